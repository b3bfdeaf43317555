"""Every state through orbax and back, also onto another number of replicas."""

import gc

import chex
import every_optimizer
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pairwise
import pytest

import optax_dist

# A restore that fails leaves tasks of orbax's behind, which complain when they
# are collected.
pytestmark = pytest.mark.filterwarnings(
  "ignore::pytest.PytestUnraisableExceptionWarning"
)

N = 4
_ADAM = optax_dist.optimizers.adam(0.1)
_PERIOD = {"communication_period": 2}

_SHARED = {
  "cross_shard": lambda n: optax.chain(
    optax_dist.cross_shard("i"), optax_dist.params_ema(0.9), _ADAM
  ),
  "sync_replicas": lambda n: optax_dist.sync_replicas(
    _ADAM,
    "i",
    replicas_to_aggregate=5,
    total_num_replicas=n,
    variable_averages=0.9,
    max_staleness=1,
    accumulator_dtype=jnp.float32,
  ),
  "sharded": lambda n: optax_dist.sharded(
    optax.sgd(0.1, momentum=0.9), "i", num_replicas=n
  ),
}
_OWN = {
  "elastic_average": lambda n: optax_dist.elastic_average(
    _ADAM, "i", num_replicas=n, moving_rate=0.2, rho=0.1, **_PERIOD
  ),
  "local_updates": lambda n: optax_dist.diloco(
    _ADAM, "i", num_replicas=n, **_PERIOD
  ),
  "streaming_updates": lambda n: optax_dist.streaming_updates(
    _ADAM,
    optax.sgd(0.7, momentum=0.9),
    "i",
    num_replicas=n,
    fragments=2,
    delay=1,
    communication_period=4,
  ),
}
_STRATEGIES = _SHARED | _OWN
_each = pytest.mark.parametrize("name", _STRATEGIES)


def _start(name, size):
  params = {"w": jnp.arange(3.0), "b": jnp.ones((), jnp.bfloat16)}
  state = _STRATEGIES[name](size).init(params)
  if name in _OWN:
    params = jax.tree.map(lambda x: jnp.stack([x] * size), params)
  return params, state


def _trained(name, params, state, size, steps):
  """Returns parameters and state after some steps, each with other gradients."""
  tx = _STRATEGIES[name](size)
  axes = (0 if name in _OWN else None, optax_dist.states.state_axes(state))

  def step(params, state, seed):
    gradient = jax.tree.map(
      lambda x: jnp.sin(seed + 2 * jnp.arange(1.0 * x.size)).reshape(x.shape),
      params,
    )
    gradient = jax.tree.map(lambda g, x: g.astype(x.dtype), gradient, params)
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  step = jax.jit(
    jax.vmap(step, axis_name="i", in_axes=(*axes, 0), out_axes=axes)
  )
  for i in steps:
    params, state = step(params, state, jnp.arange(float(size)) + 10 * i)
  return params, state


def _save(path, item):
  with ocp.StandardCheckpointer() as checkpointer:
    checkpointer.save(path, item)


def _restore(path, like):
  with ocp.StandardCheckpointer() as checkpointer:
    return checkpointer.restore(
      path, jax.tree.map(ocp.utils.to_shape_dtype_struct, like)
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
  """Yields, by strategy, the checkpoint of a run in mid-period, and the run."""
  path = tmp_path_factory.mktemp("checkpoints")
  runs = {}
  for name in _STRATEGIES:
    run = _trained(name, *_start(name, N), N, range(3))
    _save(path / name, run)
    runs[name] = (path / name, run)
  yield runs
  gc.collect()


@_each
def test_restored_run_continues_with_the_same_bits(name, saved):
  path, run = saved[name]
  # A new process has its own parameters and state to restore into.
  restored = _restore(path, _start(name, N))
  chex.assert_trees_all_equal(restored, run)
  chex.assert_trees_all_equal_dtypes(restored, run)
  chex.assert_trees_all_equal(
    _trained(name, *restored, N, range(3, 6)),
    _trained(name, *run, N, range(3, 6)),
  )


def _resized(name, params, state, size):
  if name == "sync_replicas":
    return params, optax_dist.states.resize_replicas(
      state, size, departed="fold"
    )
  if name == "sharded":
    return params, optax_dist.states.resize_sharded(state, params, size)
  if name in _OWN:
    return optax_dist.states.resize_from_center(params, state, size)
  return params, state  # Nothing in it belongs to one replica.


def _steps(state):
  field = "syncs" if hasattr(state, "syncs") else "global_step"
  return int(np.sum(getattr(state, field)))


@pairwise.every_value(size=[2, 6], name=list(_STRATEGIES))
def test_restored_run_continues_with_another_number_of_replicas(
  name, size, saved
):
  path, run = saved[name]
  params, state = _resized(name, *_restore(path, run), size)
  # The structure, shapes and types are those of a run of that size.
  chex.assert_trees_all_equal_shapes_and_dtypes(
    (params, state), _start(name, size)
  )
  after = _trained(name, params, state, size, range(3, 7))
  chex.assert_tree_all_finite(after)
  if name not in ("cross_shard", "sharded"):
    assert _steps(state) == _steps(run[1])
    assert _steps(after[1]) > _steps(run[1])
  if name in _OWN:
    chex.assert_trees_all_equal(
      optax_dist.center_params(state), optax_dist.center_params(run[1])
    )
    kept = min(size, N)
    first = lambda tree: jax.tree.map(lambda x: np.asarray(x[:kept]), tree)
    chex.assert_trees_all_equal(first(params), first(run[0]))


def test_state_of_every_optimizer_is_restored(tmp_path):
  params = {"w": jnp.arange(4.0).reshape(2, 2), "b": jnp.ones(3)}
  gradient = jax.tree.map(jnp.cos, params)
  made = {
    name: every_optimizer.BY_NAME[name](0.1) for name in every_optimizer.BY_NAME
  }
  fresh = {name: tx.init(params) for name, tx in made.items()}
  states = {
    name: tx.update(gradient, fresh[name], params)[1]
    for name, tx in made.items()
  }
  _save(tmp_path / "all", states)
  chex.assert_trees_all_equal(_restore(tmp_path / "all", fresh), states)
