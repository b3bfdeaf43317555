"""Tests of the presets: each against its paper's own formulas, by NumPy."""

import jax
import numpy as np
import optax
import pytest

from optax_dist.states import state_axes
from optax_dist.transforms.presets import bmuf, diloco, local_sgd, slowmo

N, PERIOD, ROUNDS, LR = 3, 2, 4, 0.1


def _gradients():
  return np.random.default_rng(0).normal(size=(ROUNDS, PERIOD, N, 5))


def _start():
  return np.random.default_rng(1).normal(size=5)


def _train(tx):
  """The common start of each round, with the preset ``tx``."""
  start = np.float32(_start())
  params, state = np.stack([start] * N), tx.init(start)
  axes = state_axes(state)
  step = jax.jit(
    jax.vmap(tx.update, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="i")
  )
  centers = []
  for gradients in np.float32(_gradients()):
    for g in gradients:
      updates, state = step(g, state, params)
      params = params + np.asarray(updates)
    centers.append(np.asarray(state.center))
  return np.stack(centers)


def _local_steps(x, gradients):
  """The mean of replicas that make SGD steps from ``x``."""
  return x - LR * gradients.sum(0).mean(0)


def _check(tx, round_):
  """Compares with a function of (x, mean of the replicas, number of the round)."""
  x, expected = _start(), []
  for gradients in _gradients():
    x = round_(x, _local_steps(x, gradients))
    expected.append(x)
  np.testing.assert_allclose(_train(tx), expected, rtol=1e-4, atol=1e-5)


def _arguments(**kwargs):
  return {"communication_period": PERIOD, "num_replicas": N} | kwargs


def test_local_sgd_follows_its_paper():
  tx = local_sgd(optax.sgd(LR), "i", **_arguments())
  _check(tx, lambda x, mean: mean)


@pytest.mark.parametrize("kwargs", [{}, {"outer_momentum": 0.3}])
def test_diloco_follows_its_paper(kwargs):
  tx = diloco(optax.sgd(LR), "i", **_arguments(**kwargs))
  mu, trace = kwargs.get("outer_momentum", 0.9), np.zeros(5)

  def round_(x, mean):
    trace[:] = mu * trace + (x - mean)
    return x - 0.7 * ((x - mean) + mu * trace)

  _check(tx, round_)


@pytest.mark.parametrize("kwargs", [{}, {"slow_learning_rate": 0.5}])
def test_slowmo_follows_its_paper(kwargs):
  """As in the paper, with the buffer in units of gradients."""
  tx = slowmo(optax.sgd(LR), "i", **_arguments(**kwargs))
  alpha, u = kwargs.get("slow_learning_rate", 1.0), np.zeros(5)

  def round_(x, mean):
    u[:] = 0.7 * u + (x - mean) / LR
    return x - alpha * LR * u

  _check(tx, round_)


@pytest.mark.parametrize("momentum", [None, 0.4])
@pytest.mark.parametrize("zeta", [1.0, 0.8])
@pytest.mark.parametrize("nesterov", [False, True])
def test_bmuf_follows_its_paper(nesterov, zeta, momentum):
  """As in the paper: a global model, and where replicas start from."""
  tx = bmuf(
    optax.sgd(LR),
    "i",
    block_learning_rate=zeta,
    block_momentum=momentum,
    nesterov=nesterov,
    **_arguments(),
  )
  eta = 1 - 1 / N if momentum is None else momentum
  model, delta = _start(), np.zeros(5)

  def round_(start, mean):
    delta[:] = eta * delta + zeta * (mean - start)
    model[:] = model + delta
    return model + eta * delta if nesterov else model.copy()

  _check(tx, round_)


def test_bmuf_needs_the_number_of_replicas():
  with pytest.raises(ValueError, match="`num_replicas` must be a positive"):
    bmuf(optax.sgd(LR), "i", communication_period=2, num_replicas=0)
