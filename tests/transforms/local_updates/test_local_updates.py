"""Tests of local_updates against NumPy, under vmap, pmap and shard_map."""

import functools
import re

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from own_params import normal, row, stack, take_step

from optax_dist import IndexedSlices
from optax_dist.states import state_axes, state_specs
from optax_dist.states.center import center_params, reset_to_center
from optax_dist.transforms.local_updates import local_updates

N = 4
LR = 0.1


def _start():
  return {"w": normal(0, 3, 2), "b": normal(1), "frozen": np.float32([1, 2])}


def _gradients(seed):
  return {
    "w": normal(seed, N, 3, 2),
    "b": normal(seed + 9, N),
    "frozen": None,
  }


class Oracle:
  """Replicas with momentum inside, and a momentum outside, by NumPy."""

  def __init__(self, start, *, mu, lr, outer_mu, nesterov):
    self.center = jax.tree.map(np.float64, start)
    self.params = jax.tree.map(np.float64, stack(start))
    zeros = functools.partial(jax.tree.map, np.zeros_like)
    self.trace, self.outer_trace = zeros(self.params), zeros(self.center)
    self.args = mu, lr, outer_mu, nesterov

  def update(self, gradients, ends):
    mu, lr, outer_mu, nesterov = self.args
    for k in [k for k, g in gradients.items() if g is not None]:
      self.trace[k] = mu * self.trace[k] + gradients[k]
      self.params[k] = self.params[k] - LR * self.trace[k]
      if not ends:
        continue
      moved = self.center[k] - self.params[k].mean(0)
      self.outer_trace[k] = outer_mu * self.outer_trace[k] + moved
      step = self.outer_trace[k]
      if nesterov:
        step = moved + outer_mu * step
      self.center[k] = self.center[k] - lr * step
      self.params[k] = np.stack([self.center[k]] * N)


def _inner(mu=0.5):
  # Without a gradient there is no momentum, as the state must not change.
  return optax.masked(optax.sgd(LR, momentum=mu), {"w": 1, "b": 1, "frozen": 0})


# --- The same numbers under vmap, pmap and shard_map -------------------------


@pytest.mark.parametrize("map_name", maps.NAMES)
def test_numbers_are_the_same_in_and_out_of_the_map(map_name):
  # Rounds of 1, 1, 2 and 3 steps.
  period = lambda step: jnp.where(step < 2, 0, jnp.where(step < 4, 2, 3))
  tx = local_updates(
    _inner(),
    optax.sgd(0.7, momentum=0.9, nesterov=True),
    maps.AXIS,
    communication_period=period,
    num_replicas=N,
  )
  start, traces = _start(), []
  oracle = Oracle(start, mu=0.5, lr=0.7, outer_mu=0.9, nesterov=True)

  def step(*args):
    traces.append(None)
    return take_step(tx, *args)

  params, state = stack(start), tx.init(start)
  run = maps.stepper(map_name, step, state, N)
  for i in range(8):
    gradients, ends = _gradients(i), i in (0, 1, 3, 6)
    params, new_state = run(state, params, gradients)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    state = new_state
    oracle.update(gradients, ends)
    chex.assert_trees_all_close(params, oracle.params, rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(
      jax.device_get(center_params(state)), oracle.center, rtol=1e-4, atol=1e-5
    )
    assert int(state.iterations) == {2: 1, 4: 1, 5: 2, 7: 1}.get(i, 0)
  assert int(state.global_step) == 4
  assert int(state.round_start) == 7
  # pmap tells the state of the first call, on one device, from the next.
  assert len(traces) <= 1 + (map_name == "pmap")


@maps.both_kinds
def test_replicas_that_start_apart_meet_after_a_round(map_name):
  tx = local_updates(
    optax.sgd(LR), optax.sgd(1.0), maps.AXIS, communication_period=2
  )
  params, gradients = normal(0, N, 3), normal(1, N, 2, 3)

  def train(params, gradients):
    state = tx.init({"x": params})
    first = center_params(state)["x"]
    params = {"x": params}
    for i in range(2):
      params, state = take_step(tx, state, params, {"x": gradients[i]})
    return params["x"], center_params(state)["x"], first

  got, center, first = maps.run(map_name, train, params, gradients, size=N)
  np.testing.assert_array_equal(first, np.stack([params[0]] * N))
  mean = (params - LR * gradients.sum(1)).mean(0)
  for k in range(N):
    np.testing.assert_array_equal(center[k], center[0])
    np.testing.assert_allclose(center[k], mean, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(got[k], mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("map_name", ["vmap", "shard_map_vma"])
@jax.numpy_dtype_promotion("standard")  # optax.adam is not strict.
def test_any_inner_and_outer_optimizer_works(map_name):
  """With replicas that are equal, a round is one step of a lone replica."""
  inner = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(LR))
  outer = optax.adam(0.3)
  tx = optax.chain(
    optax.clip(2.0),
    local_updates(
      inner, outer, maps.AXIS, communication_period=3, num_replicas=N
    ),
  )
  start = {k: _start()[k] for k in "wb"}
  gradients = [{"w": normal(i, 3, 2), "b": normal(i)} for i in range(6)]
  params, state = stack(start), tx.init(start)
  run = maps.stepper(map_name, functools.partial(take_step, tx), state, N)
  for g in gradients:
    params, state = run(state, params, stack(g))

  own, inner_state = start, inner.init(start)
  outer_state = outer.init(start)
  for _ in range(2):
    begin = own
    for g in [gradients.pop(0) for _ in range(3)]:
      updates, inner_state = inner.update(
        optax.clip(2.0).update(g, ())[0], inner_state, own
      )
      own = optax.apply_updates(own, updates)
    moved = jax.tree.map(jnp.subtract, begin, own)
    updates, outer_state = outer.update(moved, outer_state, begin)
    own = optax.apply_updates(begin, updates)
  for k in range(N):
    chex.assert_trees_all_close(row(params, k), own, rtol=1e-4, atol=1e-5)
  chex.assert_trees_all_close(
    jax.device_get(state[1].outer_state), outer_state, rtol=1e-4, atol=1e-5
  )


# --- Equal to the bit --------------------------------------------------------


@hypothesis.settings(max_examples=20)
@hypothesis.given(
  seed=st.integers(0, 999), spread=st.sampled_from([1e-3, 1e-1, 1.0, 1e3])
)
def test_replicas_are_equal_after_a_round_as_documented(seed, spread):
  """The center to the bit; parameters to a rounding of what they come from."""
  before, gradients = normal(seed, N, 64), spread * normal(seed + 1, N, 64)
  init, run = _one_round()
  after, state = run(before, init(before[0]), np.float32(gradients))
  after, center = np.asarray(after), np.asarray(center_params(state))
  largest = np.maximum(np.abs(before), np.abs(center)).astype(np.float32)
  assert (np.abs(after - center) <= np.spacing(largest)).all()
  # Where a parameter has not changed its sign or its magnitude, to the bit.
  near = (before / center > 0.5) & (before / center < 2)
  np.testing.assert_array_equal(after[near], np.stack([center] * N)[near])
  reset, _ = reset_to_center(after, state)
  np.testing.assert_array_equal(reset, np.stack([center] * N))


@functools.cache
def _one_round():
  tx = local_updates(
    optax.sgd(1.0),
    optax.sgd(0.7, momentum=0.9, nesterov=True),
    maps.AXIS,
    communication_period=1,
    num_replicas=N,
  )

  def step(params, state, gradients):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  axes = state_axes(tx.init(np.zeros(64, np.float32)))
  run = jax.vmap(
    step, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=maps.AXIS
  )
  return tx.init, jax.jit(run)


@maps.every_map
def test_the_center_is_equal_on_all_devices(map_name):
  tx = local_updates(
    optax.sgd(LR), optax.sgd(1.0), maps.AXIS, communication_period=1
  )

  def train(params, gradients):
    state = tx.init(params)
    _, state = tx.update(gradients, state, params)
    return center_params(state)

  center = maps.run(
    map_name, train, normal(0, N, 1000), normal(1, N, 1000), size=N
  )
  for k in range(N):
    np.testing.assert_array_equal(center[k], center[0])


# --- Communication and rounds ------------------------------------------------


def test_each_round_has_one_collective():
  where = maps.mesh(N)
  tx = local_updates(
    optax.sgd(LR, momentum=0.9),
    optax.sgd(0.7, momentum=0.9),
    maps.AXIS,
    communication_period=5,
    num_replicas=N,
  )
  params = [np.ones((N, 3), np.float32), np.ones((N, 2), np.float32)]
  state = tx.init(row(params, 0))
  specs = state_specs(state, maps.AXIS)

  def step(state, params):
    own = row(params, 0)
    updates, state = tx.update(own, state, own)
    new = optax.apply_updates(own, updates)
    return jax.tree.map(lambda x: x[None], new), state

  run = jax.jit(
    jax.shard_map(
      step,
      mesh=where,
      in_specs=(specs, P(maps.AXIS)),
      out_specs=(P(maps.AXIS), specs),
    ),
    donate_argnums=(0, 1),
  )
  text = run.lower(state, params).compile().as_text()
  entry = text[text.index("\nENTRY ") :]
  collective = r"= .*\ball-(?:reduce|gather|to-all)(?:-start)?\("
  assert len(re.findall(collective, text)) == 1
  assert not re.findall(collective, entry)
  # And all of it can be donated.
  place = lambda spec: NamedSharding(where, spec)
  shardings = jax.tree.map(place, specs, is_leaf=lambda x: isinstance(x, P))
  params, state = run(
    jax.device_put(state, shardings), jax.device_put(params, place(P("data")))
  )
  run(state, params)


def test_sparse_gradients_and_half_precision_work():
  """What the inner optimizer makes of a sparse gradient may be sparse too."""
  tx = local_updates(
    optax.stateless(lambda updates, params: updates),
    optax.sgd(1.0),
    "i",
    communication_period=1,
    num_replicas=2,
  )
  start = jnp.ones((3, 2), jnp.bfloat16)
  state = tx.init(start)
  axes = state_axes(state)

  def step(params, state, rows):
    slices = IndexedSlices(jnp.ones((1, 2), jnp.bfloat16), rows, (3, 2))
    updates, state = tx.update(slices, state, params)
    return optax.apply_updates(params, updates), state

  params, state = jax.vmap(
    step, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name="i"
  )(jnp.stack([start] * 2), state, jnp.array([[0], [2]]))
  assert params.dtype == jnp.bfloat16
  assert center_params(state).dtype == jnp.float32
  np.testing.assert_array_equal(
    params.astype(np.float32)[1, :, 0], [1.5, 1.0, 1.5]
  )


# --- Errors ------------------------------------------------------------------
