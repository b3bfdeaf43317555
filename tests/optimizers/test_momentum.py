"""Tests of gradient descent with momentum."""

import functools

import float64_runs
import pairwise

from optax_dist import optimizers


@pairwise.every_pair(
  rate=list(float64_runs.RATES), nesterov=[False, True], decay=[0.0, 0.75]
)
def test_it_is_its_formula(decay, nesterov, rate):
  """With a schedule too: the learning rate is outside of the buffer."""

  def formula(w, g, s, t, rate):
    s["a"] = decay * s["a"] + g
    return w - rate * (g + decay * s["a"] if nesterov else s["a"])

  make = functools.partial(
    optimizers.momentum, momentum=decay, use_nesterov=nesterov
  )
  float64_runs.check(make, formula, {"a": 0.0}, rate=rate, sparse="lazy")
