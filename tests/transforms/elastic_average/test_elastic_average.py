"""Tests of elastic_average against NumPy, under vmap, pmap and shard_map."""

import functools
import re

import chex
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from own_params import normal, row, stack, take_step

from optax_dist.states import state_specs
from optax_dist.states.center import center_params
from optax_dist.transforms.elastic_average import elastic_average

N = 4
LR = 0.1


def _params(seed=0):
  return {
    "w": normal(seed, 3, 2),
    "b": normal(seed + 1),
    "frozen": np.ones(2, np.float32),
  }


def _gradients(seed, size=N):
  return {
    "w": normal(seed, size, 3, 2),
    "b": normal(seed + 1, size),
    "frozen": None,
  }


class Oracle:
  """The replicas' parameters and the center, by NumPy, with SGD inside."""

  def __init__(self, params, center, period, rate, rho, exchange="after_step"):
    self.params = jax.tree.map(np.float64, params)
    self.center = jax.tree.map(np.float64, center)
    self.seen = self.center
    self.args = period, rate, rho, exchange
    self.step = 0

  def update(self, gradients):
    period, rate, rho, exchange = self.args
    self.step += 1
    met = self.center
    for name, g in gradients.items():
      if g is None:
        continue
      x = self.params[name]
      new = x - LR * (g + rho * (x - self.seen[name]))
      if self.step % period == 0:
        point = new if exchange == "after_step" else x
        pull = rate * (point - met[name])
        new = new - pull
        self.seen = {**self.seen, name: met[name]}
        self.center = {**self.center, name: met[name] + pull.sum(axis=0)}
      self.params[name] = new


def _loop(map_name, tx, state, params, all_gradients, size=N):
  """Trains, the state and the parameters crossing the map in each step."""
  traces = []

  def step(state, params, gradients):
    traces.append(None)
    return take_step(tx, state, params, gradients)

  run = maps.stepper(map_name, step, state, size)
  for gradients in all_gradients:
    params, new_state = run(state, params, gradients)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    state = new_state
    yield jax.device_get((params, state))
    # pmap tells the state of the first call, on one device, from the next.
    assert len(traces) <= 1 + (map_name == "pmap")


# --- The same numbers under vmap, pmap and shard_map -------------------------


@pairwise.every_value(
  map_name=maps.NAMES, exchange=["after_step", "same_point"]
)
def test_numbers_are_the_same_in_and_out_of_the_map(map_name, exchange):
  tx = elastic_average(
    optax.sgd(LR),
    maps.AXIS,
    num_replicas=N,
    communication_period=3,
    rho=0.5,
    exchange=exchange,
  )
  start = _params()
  oracle = Oracle(stack(start), start, 3, 0.9 / 3 / N, 0.5, exchange)
  gradients = [_gradients(i) for i in range(7)]
  loop = _loop(map_name, tx, tx.init(start), stack(start), gradients)
  for i, (params, state) in enumerate(loop):
    oracle.update(gradients[i])
    close = functools.partial(chex.assert_trees_all_close, rtol=1e-4, atol=1e-5)
    close(params, oracle.params)
    close(center_params(state), oracle.center)
    own = state.replica.value
    for k in range(N):
      close(jax.tree.map(lambda x, k=k: x[k], own.local_center), oracle.seen)
    assert own.local_step.tolist() == [i + 1] * N
    assert int(optax.tree.get(state, "global_step")) == (i + 1) // 3
    assert int(state.iterations) == (i + 1) % 3


@maps.both_kinds
def test_the_center_starts_from_the_first_replica(map_name):
  """Inside a map, replicas may start with different parameters."""
  tx = elastic_average(
    optax.sgd(LR), maps.AXIS, communication_period=2, learning_rate=LR
  )
  start = _params()
  params = {k: normal(9, N, *np.shape(v)) for k, v in start.items()}
  params["b"][1:3] = np.inf  # Others' values never matter for the center.
  gradients = [_gradients(i) for i in range(3)]
  stacked = jax.tree.map(lambda *xs: np.stack(xs, 1), *gradients)

  def train(params, gradients):
    state = tx.init(params)
    first = center_params(state)
    params["b"] = jnp.where(jnp.isfinite(params["b"]), params["b"], 1.0)
    for i in range(3):
      params, state = take_step(
        tx, state, params, jax.tree.map(lambda x, i=i: x[i], gradients)
      )
    return params, center_params(state), first

  got, center, first = maps.run(map_name, train, params, stacked, size=N)
  params["b"][1:3] = 1.0
  oracle = Oracle(params, row(params, 0), 2, 0.9 / 2 / N, 0.9 / 2 / N / LR)
  for i in range(3):
    oracle.update(gradients[i])
  for k in range(N):
    chex.assert_trees_all_equal(row(first, k), row(params, 0))
    chex.assert_trees_all_equal(row(center, k), row(center, 0))
    chex.assert_trees_all_close(row(center, k), oracle.center, rtol=1e-4)
  chex.assert_trees_all_close(got, oracle.params, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("map_name", ["vmap", "pmap", "shard_map_vma"])
@jax.numpy_dtype_promotion("standard")  # optax.adam is not strict.
def test_without_forces_replicas_follow_the_inner_optimizer(map_name):
  """In a chain, each replica by itself, whatever the inner state is."""
  inner = optax.chain(optax.adam(LR), optax.add_decayed_weights(1e-2))
  make = lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx)
  tx = make(
    elastic_average(
      inner,
      maps.AXIS,
      num_replicas=N,
      communication_period=2,
      moving_rate=0.0,
      rho=0.0,
    )
  )
  start = {"w": normal(0, 3, 2), "b": normal(1)}
  gradients = [{k: _gradients(i)[k] for k in "wb"} for i in range(4)]
  *_, (params, state) = _loop(
    map_name, tx, tx.init(start), stack(start), gradients
  )
  alone = make(inner)

  def train(gradients):
    own, own_state = start, alone.init(start)
    for g in gradients:
      updates, own_state = alone.update(g, own_state, own)
      own = optax.apply_updates(own, updates)
    return own

  expected = jax.jit(jax.vmap(train))(gradients)
  chex.assert_trees_all_close(params, expected, rtol=1e-5, atol=1e-6)
  chex.assert_trees_all_equal(center_params(state), start)
  assert int(optax.tree.get(state, "global_step")) == 2


def test_replicas_may_span_two_axes():
  mesh = jax.make_mesh(
    (4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2
  )
  both = ("data", "model")
  tx = elastic_average(
    optax.sgd(LR), both, num_replicas=8, communication_period=1, rho=0.0
  )
  start = np.float32([1.0, 2.0])
  params, gradients = stack({"x": start}, 8), {"x": normal(0, 8, 2)}
  state = tx.init({"x": start})
  specs = state_specs(state, both)
  run = jax.shard_map(
    functools.partial(_block_step, tx),
    mesh=mesh,
    in_specs=(specs, P(both), P(both)),
    out_specs=(P(both), specs),
  )
  got, state = jax.jit(run)(state, params, gradients)
  oracle = Oracle(params, {"x": start}, 1, 0.9 / 8, 0.0)
  oracle.update(gradients)
  chex.assert_trees_all_close(got, oracle.params, rtol=1e-5)
  chex.assert_trees_all_close(center_params(state), oracle.center, rtol=1e-5)


def _block_step(tx, state, params, gradients):
  """One step under shard_map: a block is one replica's row."""
  row = functools.partial(jax.tree.map, lambda x: x[0])
  params = row(params)
  updates, state = tx.update(row(gradients), state, params)
  params = optax.apply_updates(params, updates)
  return jax.tree.map(lambda x: x[None], params), state


# --- Communication -----------------------------------------------------------


def _compiled_text(period, dtypes=(np.float32, np.float32), **kwargs):
  tx = elastic_average(
    optax.sgd(LR), maps.AXIS, communication_period=period, rho=0.5, **kwargs
  )
  where = maps.mesh(N)
  params = [np.ones((N, 3), dtype) for dtype in dtypes]
  with jax.set_mesh(where):
    state = tx.init(jax.tree.map(lambda x: x[0], params))
  specs = state_specs(state, maps.AXIS)

  run = jax.jit(
    jax.shard_map(
      functools.partial(_block_step, tx),
      mesh=where,
      in_specs=(specs, P(maps.AXIS), P(maps.AXIS)),
      out_specs=(P(maps.AXIS), specs),
    )
  )
  return run.lower(state, params, params).compile().as_text()


def _all_reduces(text):
  """The names of the computations of the program that hold an all-reduce."""
  result, computation = [], None
  for line in text.splitlines():
    if header := re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line):
      computation = header[1] or header[2]
    if re.search(r"= .*\ball-(reduce|gather|to-all)(-start)?\(", line):
      result.append(computation)
  return result


@pytest.mark.parametrize("exchange", ["after_step", "same_point"])
def test_each_period_has_one_collective(exchange):
  text = _compiled_text(period=10, exchange=exchange)
  (computation,) = _all_reduces(text)
  assert computation != "ENTRY "
  branches = re.findall(r"\bconditional\(.*", text)
  branch = re.compile(rf"%?{re.escape(computation)}\b")
  assert len(list(filter(branch.search, branches))) == 1
  # At most one of each dtype (the compiler may join them), ...
  assert len(_all_reduces(_compiled_text(10, (np.float32, jnp.bfloat16)))) <= 2
  # ... and unconditional where there is an exchange in each step.
  assert _all_reduces(_compiled_text(period=1)) == ["ENTRY "]


def test_the_state_does_not_share_donated_buffers():
  """Parameters, state and all may be donated together."""
  where = maps.mesh(N)
  tx = elastic_average(optax.sgd(LR), maps.AXIS, num_replicas=N, rho=0.5)
  params = jax.device_put(
    np.ones((N, 2), np.float32), NamedSharding(where, P(maps.AXIS))
  )
  state = tx.init(jnp.ones(2))
  specs = state_specs(state, maps.AXIS)
  place = lambda spec: NamedSharding(where, spec)
  shardings = jax.tree.map(place, specs, is_leaf=lambda x: isinstance(x, P))
  run = jax.jit(
    jax.shard_map(
      functools.partial(_block_step, tx),
      mesh=where,
      in_specs=(specs, P(maps.AXIS), P(maps.AXIS)),
      out_specs=(P(maps.AXIS), specs),
    ),
    donate_argnums=(0, 1),
  )
  gradients = jnp.ones((N, 2))
  new, state = run(jax.device_put(state, shardings), params, gradients)
  new, _ = run(state, new, gradients)
  np.testing.assert_allclose(new, 1 - 2 * LR + LR * LR * 0.5, rtol=1e-6)
