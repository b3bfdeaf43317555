"""Tests of AMSGrad as in RETURNN."""

import functools

import float64_runs
import jax.numpy as jnp
import numpy as np
import pairwise

from optax_dist import optimizers


@pairwise.every_value(rate=list(float64_runs.RATES), decay=[False, True])
def test_it_is_its_formula(rate, decay):
  """With betas that are no float32 numbers: RETURNN does not round them."""

  def formula(w, g, s, t, rate):
    s["m"] = 0.9 * s["m"] + (1 - 0.9) * g
    s["v"] = 0.99 * s["v"] + (1 - 0.99) * g**2
    s["v_hat"] = np.maximum(s["v_hat"], s["v"])
    rate = rate / np.sqrt(t) if decay else rate
    return w - rate * s["m"] / (np.sqrt(s["v_hat"]) + 2.0**-10)

  float64_runs.check(
    functools.partial(
      optimizers.amsgrad, decay=decay, beta1=0.9, beta2=0.99, epsilon=2.0**-10
    ),
    formula,
    {"m": 0.0, "v": 0.0, "v_hat": 0.0},
    rate=rate,
    sparse="lazy",
  )


def test_with_epsilon_zero_it_is_nan_without_gradients():
  optimizer = optimizers.amsgrad()
  params = jnp.ones(2)
  updates, _ = optimizer.update(
    jnp.array([0.0, 1.0]), optimizer.init(params), params
  )
  assert np.isnan(updates).tolist() == [True, False]
