"""Records TensorFlow's learning rates and clipping: `schedules.json`.

To be run where TensorFlow 2.21 is installed:

  python tests/golden/tensorflow1/record_schedules.py
"""

import json
import pathlib

import numpy as np

STEPS = 12
GRADIENTS = {
  "long": [[3.0, -4.0], [0.0, 12.0]],
  "short": [0.25, -0.5, 0.125],
  "zero": [0.0, 0.0],
}
SCALE = 0.25


def schedules(train):
  """Returns, by name, functions of the global step that return a rate."""
  return {
    "exponential_decay": lambda t: train.exponential_decay(0.1, t, 4, 0.5),
    "exponential_decay_staircase": lambda t: train.exponential_decay(
      0.1, t, 4, 0.5, staircase=True
    ),
    "natural_exp_decay": lambda t: train.natural_exp_decay(0.1, t, 4, 0.5),
    "natural_exp_decay_staircase": lambda t: train.natural_exp_decay(
      0.1, t, 4, 0.5, staircase=True
    ),
    "inverse_time_decay": lambda t: train.inverse_time_decay(0.1, t, 4, 0.5),
    "inverse_time_decay_staircase": lambda t: train.inverse_time_decay(
      0.1, t, 4, 0.5, staircase=True
    ),
    "polynomial_decay": lambda t: train.polynomial_decay(0.1, t, 5, power=2.0),
    "polynomial_decay_cycle": lambda t: train.polynomial_decay(
      0.1, t, 5, power=2.0, cycle=True
    ),
    "piecewise_constant": lambda t: train.piecewise_constant(
      t, [3, 7], [1.0, 0.5, 0.1]
    ),
    "cosine_decay": lambda t: train.cosine_decay(0.1, t, 5, alpha=0.2),
  }


def clipped(tf1):
  """Returns, by name, functions of all gradients that return them clipped."""
  each = lambda clip: lambda grads: [clip(g) for g in grads]
  return {
    "clip_by_value": each(lambda g: tf1.clip_by_value(g, -0.3, 0.3)),
    "clip_by_norm": each(lambda g: tf1.clip_by_norm(g, 1.5)),
    "clip_by_global_norm": lambda grads: tf1.clip_by_global_norm(grads, 1.5)[0],
    # The gradients of a loss of the variables alone.
    "l2_loss": each(lambda w: tf1.gradients(SCALE * tf1.nn.l2_loss(w), w)[0]),
  }


def train(tf1, optimizer, global_step):
  """Returns the variable after each step of a constant gradient."""
  w = tf1.get_variable("w", initializer=np.zeros(1, np.float32))
  step = optimizer.apply_gradients([(tf1.ones(1), w)], global_step=global_step)
  with tf1.Session() as session:
    session.run(tf1.global_variables_initializer())
    rows = []
    for _ in range(STEPS):
      session.run(step)
      rows.append(float(session.run(w)[0]))
  return rows


def main():
  import tensorflow as tf

  tf1 = tf.compat.v1
  recorded = {"schedules": {}, "gradients": GRADIENTS, "clipped": {}}
  recorded["scale"] = SCALE
  with tf.Graph().as_default(), tf1.Session() as session:
    t = tf1.placeholder(tf.int32, [])
    for name, schedule in schedules(tf1.train).items():
      rate = schedule(t)
      recorded["schedules"][name] = [
        float(session.run(rate, {t: i})) for i in range(STEPS)
      ]
    for name, function in clipped(tf1).items():
      grads = [tf1.constant(x, tf.float32) for x in GRADIENTS.values()]
      values = session.run(function(grads))
      recorded["clipped"][name] = {
        key: x.tolist() for key, x in zip(GRADIENTS, values, strict=True)
      }
  with tf.Graph().as_default():
    t = tf1.train.get_or_create_global_step()
    rate = tf1.train.piecewise_constant(
      tf.cast(t, tf.int32), [3, 7], [1.0, 0.5, 0.1]
    )
    optimizer = tf1.train.GradientDescentOptimizer(rate)
    recorded["trained"] = train(tf1, optimizer, t)
  path = pathlib.Path(__file__).with_name("schedules.json")
  path.write_text(json.dumps(recorded, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
  main()
