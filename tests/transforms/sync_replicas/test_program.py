"""Tests of the program that sync_replicas compiles to, and of what travels."""

import jax
import jax.extend.core
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

import optax_dist

N = 4
LEAVES = 5


def _collectives(tx, **kwargs):
  params = {str(i): np.zeros((8,), np.float32) for i in range(LEAVES)}
  state = tx.init(params)
  stacked = jax.tree.map(lambda x: np.tile(x, (N, 1)), params)

  def step(state, g):
    kw = {k: v() for k, v in kwargs.items()}
    return tx.update(g, state, params, **kw)

  run = maps.stepper("shard_map_vma", step, state, N)
  jaxpr = jax.make_jaxpr(run)(state, stacked).jaxpr
  return _count(jaxpr, "psum", conds=False), _count(jaxpr, "psum", conds=True)


def _count(jaxpr, name, conds):
  """Counts collectives, outside of every cond and loop or within them."""

  def walk(jaxpr, inside):
    total = 0
    for eqn in jaxpr.eqns:
      total += eqn.primitive.name.startswith(name) and inside == conds
      is_cond = eqn.primitive.name in ("cond", "while")
      for sub in jax.extend.core.jaxprs_in_params(eqn.params):
        total += walk(sub, inside or is_cond)
    return total

  return walk(jaxpr, False)


@pytest.mark.parametrize("all_arrive", [False, True])
@pytest.mark.parametrize("needed", [2, N])
def test_each_leaf_and_the_count_are_summed_once_per_step(needed, all_arrive):
  tx = optax_dist.sync_replicas(
    optax.sgd(1.0),
    maps.AXIS,
    replicas_to_aggregate=needed,
    total_num_replicas=N,
    all_arrive=all_arrive,
  )
  count = 0 if all_arrive else 1
  assert _collectives(tx) == (LEAVES + count, 0)


@pytest.mark.parametrize("all_arrive", [False, True])
def test_accumulation_communicates_nothing(all_arrive):
  tx = optax_dist.sync_replicas(
    optax.sgd(1.0),
    maps.AXIS,
    replicas_to_aggregate=3 * N,
    total_num_replicas=N,
    all_arrive=all_arrive,
  )
  count = 0 if all_arrive else 1
  assert _collectives(tx) == (0, LEAVES + count)


@maps.both_kinds
def test_steps_share_one_compilation(map_name):
  tx = optax_dist.sync_replicas(
    optax.sgd(1.0), maps.AXIS, replicas_to_aggregate=6, total_num_replicas=N
  )
  traces = []

  def step(state, g, arrived):
    traces.append(None)
    return tx.update(g, state, arrived=arrived)

  state = tx.init(np.zeros(2, np.float32))
  run = maps.stepper(map_name, step, state, N)
  for seed in range(4):
    arrived = np.random.default_rng(seed).random(N) < 0.5
    _, state = run(state, np.ones((N, 2), np.float32), arrived)
    # pmap traces again for its own output, which is placed unlike its input.
    assert len(traces) <= (1 if map_name != "pmap" else 2)


def test_the_state_can_be_donated_with_the_parameters():
  tx = optax_dist.sync_replicas(
    optax.sgd(1.0, momentum=0.9),
    maps.AXIS,
    replicas_to_aggregate=N,
    total_num_replicas=N,
    variable_averages=0.9,
  )
  params = jnp.ones(2)
  # An array that is there twice can't be donated.
  leaves = jax.tree.leaves((params, tx.init(params)))
  arrays = [x.unsafe_buffer_pointer() for x in leaves]
  assert len(set(arrays)) == len(arrays)
