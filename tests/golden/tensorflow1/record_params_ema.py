"""Records TensorFlow 1's moving averages of variables: `params_ema.json`.

To be run where TensorFlow 2.21 is installed:

  python tests/golden/tensorflow1/record_params_ema.py
"""

import json
import pathlib

import numpy as np

STEPS = 12
#: The decay, whether `num_updates` is the step, and `zero_debias`.
CASES = {
  "constant": (0.9999, False, False),
  "num_updates": (0.9999, True, False),
  "zero_debias": (0.9999, True, True),
}
LEARNING_RATE = 0.5


def gradients():
  """Returns the gradients of all steps, and the statistics after each."""
  rng = np.random.default_rng(20261128)
  return (
    rng.normal(size=(STEPS, 3)).astype(np.float32),
    rng.normal(size=(STEPS, 2)).astype(np.float32),
  )


def run(decay, with_step, zero_debias, before):
  """Returns the averages after each step, and the parameters.

  Args:
    decay: of the averages.
    with_step: whether `num_updates` is the global step.
    zero_debias: of the averages, which start as their variables.
    before: whether the averages move before the step (slim's `update_ops`), or
      after it (`control_dependencies([train_op])`).
  """
  import tensorflow as tf

  tf1 = tf.compat.v1
  grads, stats = gradients()
  with tf.Graph().as_default(), tf1.Session() as session:
    w = tf1.get_variable("w", initializer=np.array([1, -1, 0.5], np.float32))
    mean = tf1.get_variable(
      "mean", initializer=np.zeros(2, np.float32), trainable=False
    )
    step = tf1.train.get_or_create_global_step()
    grad = tf1.placeholder(tf.float32, [3])
    stat = tf1.placeholder(tf.float32, [2])
    averages = tf1.train.ExponentialMovingAverage(
      decay,
      num_updates=step if with_step else None,
      zero_debias=zero_debias,
    )
    optimizer = tf1.train.GradientDescentOptimizer(LEARNING_RATE)

    def train():
      return tf.group(
        optimizer.apply_gradients([(grad, w)], global_step=step),
        tf1.assign(mean, stat),
      )

    if before:
      with tf.control_dependencies([averages.apply([w, mean])]):
        op = train()
    else:
      with tf.control_dependencies([train()]):
        op = averages.apply([w, mean])
    # An average starts as its variable.
    session.run([w.initializer, mean.initializer])
    session.run(tf1.global_variables_initializer())
    rows = []
    for g, s in zip(grads, stats, strict=True):
      session.run(op, {grad: g, stat: s})
      rows.append(
        session.run([w, mean, averages.average(w), averages.average(mean)])
      )
    names = ("w", "mean", "average_of_w", "average_of_mean")
    return {
      name: np.stack(column).tolist()
      for name, column in zip(names, zip(*rows, strict=True), strict=True)
    }


def main():
  grads, stats = gradients()
  recorded = {
    "gradients": grads.tolist(),
    "statistics": stats.tolist(),
    "cases": {
      f"{name}_{'before' if before else 'after'}": run(*case, before)
      for name, case in CASES.items()
      for before in (False, True)
    },
  }
  path = pathlib.Path(__file__).with_name("params_ema.json")
  path.write_text(json.dumps(recorded) + "\n")


if __name__ == "__main__":
  main()
