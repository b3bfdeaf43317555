"""Records what scripts do with TensorFlow's CrossShardOptimizer: `cross_shard.json`.

To be run where TensorFlow 2.21 is installed:

  python tests/golden/tensorflow1/record_cross_shard.py

A shard is a thread with a graph of its own. The sum over TPU cores, the one
operation that needs a TPU, is replaced by one over the threads.
"""

import json
import pathlib
import threading

import numpy as np

SHARDS = 8
STEPS = 5


def batches():
  """Returns the batches of all steps, of all shards: [steps, 4 * shards, 3]."""
  rng = np.random.default_rng(20261129)
  batches = rng.normal(size=(STEPS, 4 * SHARDS, 3))
  # The gradients of shards differ in size, so that clipping matters.
  sizes = np.repeat(np.linspace(0.2, 2, SHARDS), 4)[:, np.newaxis]
  return (batches * sizes).astype(np.float32)


class SumOverThreads:
  """In place of `tpu_ops.cross_replica_sum`."""

  def __init__(self):
    self._barrier = threading.Barrier(SHARDS)
    self._values = {}
    self._here = threading.local()
    self._lock = threading.Lock()

  def enter(self, shard):
    self._here.shard, self._here.calls = shard, 0

  def __call__(self, x, group_assignment=None):
    import tensorflow as tf

    shard, call = self._here.shard, self._here.calls
    self._here.calls += 1
    groups = group_assignment or [list(range(SHARDS))]
    (group,) = (group for group in groups if shard in group)

    def total(value):
      with self._lock:
        self._values[call, shard] = value
      self._barrier.wait()
      result = sum(self._values[call, other] for other in group)
      self._barrier.wait()
      return result.astype(value.dtype)

    y = tf.compat.v1.py_func(total, [x], x.dtype)
    y.set_shape(x.shape)
    return y


def _minimize(tf1, optimizer, loss, w, step, bound):
  del bound
  return optimizer.minimize(loss, global_step=step)


def _compute_clip_apply(tf1, optimizer, loss, w, step, bound):
  grads, variables = zip(*optimizer.compute_gradients(loss, [w]), strict=True)
  grads, _ = tf1.clip_by_global_norm(grads, bound)
  return optimizer.apply_gradients(
    list(zip(grads, variables, strict=True)), global_step=step
  )


def _gradients_clip_apply(tf1, optimizer, loss, w, step, bound):
  grads, _ = tf1.clip_by_global_norm(tf1.gradients(loss, [w]), bound)
  return optimizer.apply_gradients([(grads[0], w)], global_step=step)


def _gradients_apply(tf1, optimizer, loss, w, step, bound):
  del bound
  return optimizer.apply_gradients(
    list(zip(tf1.gradients(loss, [w]), [w], strict=True)), global_step=step
  )


def _grad_loss(tf1, optimizer, loss, w, step, bound):
  """The gradient of three times the loss."""
  del bound
  return optimizer.minimize(loss, global_step=step, grad_loss=loss * 0 + 3.0)


_SUM = {"reduction": "weighted_sum"}
_GROUPS = {"group_assignment": [[0, 3, 5, 6], [1, 2, 4, 7]]}
#: How gradients are applied, the optimizer, arguments of CrossShardOptimizer.
CASES = {
  "minimize": (_minimize, "sgd", {}),
  "minimize_adam": (_minimize, "adam", {}),
  "minimize_averages": (_minimize, "sgd", {}),
  "minimize_sum": (_minimize, "sgd", _SUM),
  "minimize_groups": (_minimize, "sgd", _GROUPS),
  "grad_loss": (_grad_loss, "sgd", {}),
  "compute_clip_apply": (_compute_clip_apply, "sgd", {}),
  "compute_clip_apply_sum": (_compute_clip_apply, "sgd", _SUM),
  "compute_clip_apply_groups": (_compute_clip_apply, "sgd", _GROUPS),
  "gradients_apply": (_gradients_apply, "sgd", {}),
  "gradients_clip_apply": (_gradients_clip_apply, "sgd", {}),
}
BOUND = 0.1
RATES = {"sgd": 0.1, "adam": 1e-3}


def run(case):
  """Returns the variable after each step, of each shard."""
  import tensorflow as tf
  from tensorflow.python.tpu import tpu_function, tpu_optimizer

  tf1 = tf.compat.v1
  apply, kind, arguments = CASES[case]
  total = SumOverThreads()
  tpu_optimizer.tpu_ops.cross_replica_sum = total
  results = [None] * SHARDS
  data = batches().reshape(STEPS, SHARDS, 4, 3)

  def shard(index):
    total.enter(index)
    # The shards wait for each other inside of operations.
    config = tf1.ConfigProto(use_per_session_threads=True)
    with tf.Graph().as_default(), tf1.Session(config=config) as session:
      w = tf1.get_variable("w", initializer=np.zeros(3, np.float32))
      step = tf1.train.get_or_create_global_step()
      batch = tf1.placeholder(tf.float32, [4, 3])
      loss = tf.reduce_mean((tf.linalg.matvec(batch, w) - 1.0) ** 2)
      inner = {
        "sgd": tf1.train.GradientDescentOptimizer,
        "adam": tf1.train.AdamOptimizer,
      }[kind](RATES[kind])
      optimizer = tf1.tpu.CrossShardOptimizer(inner, **arguments)
      with tpu_function.tpu_shard_context(SHARDS):
        op = apply(tf1, optimizer, loss, w, step, BOUND)
      seen = [w]
      if case == "minimize_averages":
        averages = tf1.train.ExponentialMovingAverage(0.9999, num_updates=step)
        with tf.control_dependencies([op]):
          op = averages.apply([w])
        seen.append(averages.average(w))
      session.run(w.initializer)
      session.run(tf1.global_variables_initializer())
      rows = []
      for x in data[:, index]:
        session.run(op, {batch: x})
        rows.append(session.run(seen))
      results[index] = np.asarray(rows)

  threads = [
    threading.Thread(target=shard, args=(index,)) for index in range(SHARDS)
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  names = ["w", "average"]
  stacked = np.stack(results, axis=1)  # Steps, shards, what is seen.
  return {
    name: stacked[:, :, i].tolist()
    for i, name in enumerate(names[: stacked.shape[2]])
  }


def main():
  recorded = {
    "batches": batches().tolist(),
    "bound": BOUND,
    "rates": RATES,
    "cases": {case: run(case) for case in CASES},
  }
  path = pathlib.Path(__file__).with_name("cross_shard.json")
  path.write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
  main()
