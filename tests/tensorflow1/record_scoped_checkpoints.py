"""Records checkpoints of optimizers that were built in scopes, and others.

To be run where TensorFlow 2.21 and tf_keras are installed:

  python tests/tensorflow1/record_scoped_checkpoints.py

`scoped_checkpoints.json` then has the variables after three steps, and the
parameters after three more, as in `checkpoints.json`.
"""

import contextlib
import json
import pathlib

import numpy as np


def _adam(tf1):
  return tf1.train.AdamOptimizer(0.1)


def _accumulating_adam(tf1):
  """Adam with a third slot, for the sum of gradients of several batches."""

  class MultistepAdamOptimizer(tf1.train.AdamOptimizer):
    def _create_slots(self, var_list):
      super()._create_slots(var_list)
      for v in var_list:
        self._zeros_slot(v, "grad_acc", self._name)

  return MultistepAdamOptimizer(0.1)


def _two(tf1):
  """One optimizer for each variable, as in wide-and-deep models."""
  del tf1


class _WeightDecay:
  """Adam without bias correction, with decoupled weight decay, as in BERT.

  The step itself is left to the script, and the slots are variables that are
  named after the parameters.
  """

  def __init__(self, tf1):
    self.tf1 = tf1

  def apply_gradients(self, grads_and_vars, global_step=None):
    del global_step
    tf1, ops = self.tf1, []
    for grad, var in grads_and_vars:
      slots = []
      for name in ("adam_m", "adam_v"):
        slots.append(
          tf1.get_variable(
            f"{var.op.name}/{name}",
            shape=var.shape.as_list(),
            trainable=False,
            initializer=tf1.zeros_initializer(),
          )
        )
      m, v = slots
      new_m = 0.9 * m + 0.1 * grad
      new_v = 0.999 * v + 0.001 * grad**2
      step = new_m / (tf1.sqrt(new_v) + 1e-6) + 0.01 * var
      ops += [
        tf1.assign(var, var - 0.1 * step),
        tf1.assign(m, new_m),
        tf1.assign(v, new_v),
      ]
    return tf1.group(*ops)


def _keras(name, **arguments):
  def make(tf1):
    del tf1
    import tf_keras

    return getattr(tf_keras.optimizers.legacy, name)(0.1, **arguments)

  return make


#: The optimizer, and the variable scope and the name scope that it is built in.
CASES = {
  "variable_scope": (_adam, "training", None),
  "name_scope": (_adam, None, "train"),
  "both_scopes": (_adam, "OptimizeLoss", "inner"),
  "accumulating": (_accumulating_adam, "training", None),
  "two_optimizers": (_two, "training", None),
  "bert": (_WeightDecay, None, None),
  "keras_adam": (_keras("Adam"), None, None),
  "keras_adam_in_scopes": (_keras("Adam"), "training", "inner"),
  "keras_nadam": (_keras("Nadam"), None, None),
  "keras_sgd": (_keras("SGD", momentum=0.9), None, None),
  "keras_rmsprop": (
    _keras("RMSprop", momentum=0.9, centered=True),
    None,
    "training",
  ),
}


def run(case):
  """Returns the variables after three steps, and the parameters after six."""
  import tensorflow as tf

  tf1 = tf.compat.v1
  make, scope, name_scope = CASES[case]
  tf1.set_random_seed(0)
  with tf.Graph().as_default(), tf1.Session() as session:
    with tf1.variable_scope("layer"):
      start = np.array([[0.5, -1], [2, 0.25], [-0.75, 1]], np.float32)
      kernel = tf1.get_variable("kernel", initializer=start)
      bias = tf1.get_variable("bias", initializer=np.array([0, 2], np.float32))
    step = None
    if not case.startswith("keras"):
      step = tf1.train.get_or_create_global_step()
    loss = tf.reduce_sum(kernel**2) + tf.reduce_sum((bias - 1.0) ** 2)
    grads = tf1.gradients(loss, [kernel, bias])
    with contextlib.ExitStack() as stack:
      if scope:
        stack.enter_context(tf1.variable_scope(scope))
      if name_scope:
        stack.enter_context(tf.name_scope(name_scope))
      if case == "two_optimizers":
        op = tf.group(
          tf1.train.AdamOptimizer(0.1).apply_gradients(
            [(grads[0], kernel)], global_step=step
          ),
          tf1.train.FtrlOptimizer(0.1).apply_gradients([(grads[1], bias)]),
        )
      elif case.startswith("keras"):
        op = make(tf1).apply_gradients(zip(grads, [kernel, bias], strict=True))
      else:
        op = make(tf1).apply_gradients(
          list(zip(grads, [kernel, bias], strict=True)), global_step=step
        )
      if case == "bert":
        op = tf.group(op, tf1.assign_add(step, 1))
      with tf.control_dependencies([op]):
        averages = tf1.train.ExponentialMovingAverage(0.9)
        op = averages.apply([kernel, bias])
    session.run([kernel.initializer, bias.initializer])
    session.run(tf1.global_variables_initializer())

    def values():
      all_of_them = tf1.global_variables()
      pairs = zip(all_of_them, session.run(all_of_them), strict=True)
      return {variable.op.name: value.tolist() for variable, value in pairs}

    for _ in range(3):
      session.run(op)
    variables = values()
    for _ in range(3):
      session.run(op)
    return {"variables": variables, "after": values()}


def main():
  import tensorflow as tf

  tf.compat.v1.disable_eager_execution()
  recorded = {}
  for case in CASES:
    result = run(case)
    result["after"] = {
      key: value
      for key, value in result["after"].items()
      if key in ("layer/kernel", "layer/bias")
      or key.endswith("ExponentialMovingAverage")
    }
    recorded[case] = result
  path = pathlib.Path(__file__).with_name("scoped_checkpoints.json")
  path.write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
  main()
