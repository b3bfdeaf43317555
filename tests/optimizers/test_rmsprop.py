"""Tests of RMSProp."""

import functools

import float64_runs
import numpy as np
import pairwise

from optax_dist import optimizers


@pairwise.every_pair(
  rate=list(float64_runs.RATES), centered=[False, True], momentum=[0.0, 0.75]
)
def test_it_is_its_formula(momentum, centered, rate):
  """With a schedule too: the learning rate is inside of the momentum."""

  def formula(w, g, s, t, rate):
    s["s"] = 0.875 * s["s"] + 0.125 * g**2
    s["c"] = centered * (0.875 * s["c"] + 0.125 * g)
    root = np.sqrt(s["s"] - s["c"] ** 2 + 2.0**-10)
    s["b"] = momentum * s["b"] + rate * g / root
    return w - s["b"]

  make = functools.partial(
    optimizers.rmsprop,
    decay=0.875,
    momentum=momentum,
    epsilon=2.0**-10,
    centered=centered,
  )
  start = {"s": 1.0, "c": 0.0, "b": 0.0}
  float64_runs.check(make, formula, start, rate=rate, sparse="lazy")
