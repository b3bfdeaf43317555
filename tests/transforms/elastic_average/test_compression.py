"""Tests of elastic_average with pulls that are sent in fewer bytes."""

import functools

import jax
import maps
import numpy as np
import optax
import pairwise
import pytest
from own_params import normal, stack, take_step

import optax_dist
from optax_dist import compression

N = 4
METHODS = {
  "top_k": compression.top_k(0.4, bits=4),
  "quantize": compression.quantize(2),
  "stochastic": compression.quantize(4, stochastic=True),
}


def _tx(method, rate=0.0, **kwargs):
  return optax_dist.elastic_average(
    optax.sgd(rate),
    maps.AXIS,
    num_replicas=N,
    moving_rate=0.15,
    rho=0.0,
    compression=method,
    **kwargs,
  )


def _train(map_name, tx, params, gradients):
  """Trains, and returns the parameters and the center after each step."""
  start = jax.tree.map(lambda x: x[0], params)
  state = tx.init(start)
  run = maps.stepper(map_name, functools.partial(take_step, tx), state, N)
  for gradient in gradients:
    params, new_state = run(state, params, gradient)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (state, new_state))
    assert shapes[0] == shapes[1]
    state = new_state
    yield jax.tree.map(np.asarray, (params, state.center))


@maps.both_kinds
def test_lossless_compression_changes_nothing(map_name):
  params = stack({"a": normal(0, 6, 5), "b": normal(1, 7), "c": normal(2, 2)})
  gradients = [
    {"a": normal(i, N, 6, 5), "b": normal(i + 9, N, 7), "c": None}
    for i in range(6)
  ]
  runs = [
    _train(
      map_name, _tx(method, 0.1, communication_period=3), params, gradients
    )
    for method in (None, compression.top_k(1.0))
  ]
  for plain, compressed in zip(*runs, strict=True):
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6),
      plain,
      compressed,
    )


@pairwise.every_value(name=list(METHODS), map_name=["vmap", "shard_map_vma"])
def test_compressed_pulls_keep_the_sum_of_replicas_and_center(name, map_name):
  """Their sum is constant, and they meet at the mean of all starting points."""
  params = {"a": normal(0, N, 8, 5), "b": normal(1, N, 7)}
  still = jax.tree.map(np.zeros_like, params)
  tx = _tx(METHODS[name], communication_period=1)
  total = jax.tree.map(lambda x: x.sum(0) + x[0], params)
  for now, center in _train(map_name, tx, params, [still] * 60):
    sums = jax.tree.map(lambda x, c: x.sum(0) + c, now, center)
    jax.tree.map(
      functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-4),
      sums,
      total,
    )
  apart = jax.tree.map(lambda x, c: np.abs(x - c).max(), now, center)
  assert max(jax.tree.leaves(apart)) < 1e-2, apart


@maps.both_kinds
def test_replica_moves_by_the_sent_part_of_its_pull(map_name):
  params = normal(0, N, 40)
  tx = _tx(compression.top_k(0.2), communication_period=1)
  (now, center), *_ = _train(map_name, tx, params, [np.zeros_like(params)])
  moves = params - now
  # The first replica is at the center.
  assert np.count_nonzero(moves, axis=1).tolist() == [0, 8, 8, 8]
  np.testing.assert_allclose(moves.sum(0), center - params[0], atol=1e-6)


@maps.both_kinds
def test_nonfinite_replica_moves_nothing(map_name):
  params = normal(0, N, 8, 5)
  params[2, 3] = np.nan
  tx = _tx(METHODS["quantize"], communication_period=1)
  *_, (now, center) = _train(map_name, tx, params, [np.zeros_like(params)] * 3)
  assert np.isfinite(center).all()
  assert np.isfinite(now[[0, 1, 3]]).all()
  kept = params[[0, 1, 3]].sum(0) + params[0]
  np.testing.assert_allclose(now[[0, 1, 3]].sum(0) + center, kept, atol=1e-4)


@pytest.mark.parametrize(
  "method",
  [
    compression.sign(),
    compression.sign(error_feedback=1.0),
    compression.power_sgd(1),
    compression.quantize(8, error_feedback=None),
  ],
)
def test_methods_without_per_replica_messages_are_refused(method):
  with pytest.raises(ValueError, match=f"got {method.name} with"):
    _tx(method)
