"""Tests of streaming_updates with compression, under all kinds of map."""

import functools

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest
from jax.sharding import PartitionSpec as P
from own_params import normal, stack, take_step

import optax_dist
from optax_dist import compression

N = 4
RATE = 0.1
PERIOD = 4
METHODS = {
  "top_k": compression.top_k(0.3, bits=2, error_feedback=0.9),
  "sign": compression.sign(error_feedback=1.0),
  "power_sgd": compression.power_sgd(1),
}


def _start():
  return {"a": normal(0, 6, 5), "b": normal(1, 7), "c": normal(2, 2)}


def _fragment_of(params):
  # c belongs to the first, as does a; its gradient is None.
  return {k: "acb".index(k) // 2 for k in params}


def _gradients(seed):
  return {"a": normal(seed, N, 6, 5), "b": normal(seed + 9, N, 7), "c": None}


def _tx(method, delay=0, **kwargs):
  return optax_dist.streaming_updates(
    optax.sgd(RATE),
    optax.sgd(0.5),
    maps.AXIS,
    communication_period=PERIOD,
    fragments=_fragment_of,
    delay=delay,
    num_replicas=N,
    compression=method,
    **kwargs,
  )


@functools.cache
def _reduce(name):
  method = METHODS[name]
  return jax.jit(
    jax.vmap(lambda x, s: method.reduce(x, s, ("data",)), axis_name="data")
  )


@functools.cache
def _expected(name, delay):
  """By a loop in NumPy around the method, a fragment at a time."""
  method, start = METHODS[name], _start()
  params, center, pending, out = stack(start), dict(start), {}, []
  # A parameter without a gradient is part of what its fragment sends.
  fragments = {2: ("a", "c"), 0: ("b",)}
  states = {
    tick: jax.vmap(lambda _, ks=ks: method.init([start[k] for k in ks]))(
      jnp.arange(N)
    )
    for tick, ks in fragments.items()
  }
  for i in range(1, 9):
    for k in "ab":
      params[k] = params[k] - RATE * _gradients(i - 1)[k]
    for tick, keys in fragments.items():
      if i % PERIOD == tick:
        gaps = [center[k][None] - params[k] for k in keys]
        mean, states[tick] = _reduce(name)(gaps, states[tick])
        pending[i + delay, tick] = [np.asarray(m[0]) for m in mean]
      if (i, tick) in pending:
        for k, m in zip(keys, pending[i, tick], strict=True):
          if k != "c":
            center[k] = center[k] - np.float32(0.5) * m
            params[k] = np.stack([center[k]] * N)
    out.append((dict(params), dict(center)))
  return out


@pairwise.every_value(
  name=["top_k", "sign", "power_sgd"], map_name=["shard_map_vma", "vmap"]
)
def test_each_fragment_is_sent_by_the_method(name, map_name):
  delay = 3 if name == "top_k" else 0
  tx, start = _tx(METHODS[name], delay), _start()
  params, state = stack(start), tx.init(start)
  run = maps.stepper(map_name, functools.partial(take_step, tx), state, N)
  for i, (expected, center) in enumerate(_expected(name, delay)):
    params, new_state = run(state, params, _gradients(i))
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), (state, new_state))
    assert shapes[0] == shapes[1]
    state = new_state
    for k in start:
      np.testing.assert_allclose(params[k], expected[k], rtol=1e-3, atol=2e-4)
      np.testing.assert_allclose(
        state.center[k], center[k], rtol=1e-3, atol=2e-4
      )


@maps.both_kinds
@pytest.mark.parametrize("delay", [0, 2])
def test_residual_arrives_once(delay, map_name):
  """Also where replicas keep a part of it in their own parameters."""
  start = normal(0, 40)
  tx = optax_dist.streaming_updates(
    optax.sgd(1.0),
    optax.sgd(1.0),
    maps.AXIS,
    communication_period=3,
    fragments=1,
    delay=delay,
    mix=0.5,
    num_replicas=N,
    compression=compression.top_k(0.2),
  )
  params, state = np.stack([start] * N), tx.init(start)
  run = maps.stepper(map_name, functools.partial(take_step, tx), state, N)
  learned = np.stack([normal(1, 40)] * N)
  for i in range(18):
    params, state = run(state, params, learned if i == 0 else 0 * learned)
    # All replicas have learned the same, and send a fifth of it in a round.
    part = np.asarray((start - state.center) / learned[0])
    there = np.abs(part) > 0.5
    np.testing.assert_allclose(part, there, atol=1e-3)
    rounds = max(0, i + 1 - delay) // 3
    assert np.sum(there) == min(8 * rounds, 40)


def test_error_feedback_belongs_to_each_replica():
  """state_specs and state_axes carry it with the replicas."""
  method = METHODS["power_sgd"]
  state = _tx(method).init(_start())
  residual = state.replica.value.residual
  shapes = jax.tree.map(lambda x: x.shape[1:], residual)
  masked = optax.MaskedNode()
  assert shapes[0] == {"a": (6, 5), "b": masked, "c": (2,)}
  assert shapes[1] == {"a": masked, "b": (7,), "c": masked}
  specs = optax_dist.states.state_specs(state, maps.AXIS)
  own = jax.tree.leaves(
    specs.replica.value.residual, is_leaf=lambda x: isinstance(x, P)
  )
  assert own == [P(maps.AXIS)] * 3
  # The factors are equal on all replicas.
  assert state.shared[0]["a"].value.shape == (5, 1)
  shared = jax.tree.leaves(specs.shared, is_leaf=lambda x: isinstance(x, P))
  assert shared == [P()]
  assert _tx(compression.sign()).init(_start()).replica.value.residual == (
    None,
    None,
  )
