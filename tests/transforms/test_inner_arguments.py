"""Keyword arguments of ``update`` for the transformation inside.

Where all replicas share it, what optax names is averaged, and nothing else may differ.
"""

import every_transform
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest

import optax_dist

N = 4
MAPS = ["vmap", "pmap", "shard_map", "shard_map_vma", "plain_jit"]
ROWS = np.array([[1, 2], [3, 4], [5, 6], [7, 9]], np.float32)
START = np.zeros(2, np.float32)


def _loss(params, row):
  return jnp.sum((params - row) ** 2)


def _plateau():
  """Halves the rate when a loss is no better than the best."""
  return optax.chain(
    optax.sgd(0.1),
    optax.contrib.reduce_on_plateau(
      factor=0.5, patience=1, rtol=0.0, atol=1e-6, cooldown=0
    ),
  )


def _make(kind, inner):
  if kind == "per_replica":
    tx = optax.MultiSteps(
      optax.chain(optax_dist.cross_shard(maps.AXIS), inner), 1
    )
    return optax_dist.per_replica(tx, maps.AXIS, "acc_grads", num_replicas=N)
  return every_transform.make(kind, inner, N)


# reduce_on_plateau needs it.
@jax.numpy_dtype_promotion("standard")
@pairwise.every_pair(
  map_name=MAPS, kind=["sync_replicas", "sharded", "per_replica"]
)
def test_losses_of_the_replicas_are_averaged(map_name, kind):
  """Each took another learning rate, which all of them shared."""
  inner = _plateau()
  tx = _make(kind, inner)
  # Replica 0 gets better, the others don't, and neither does the mean.
  losses = np.array([[3, 3, 3, 3], [2, 4, 4, 4], [1, 5, 5, 5], [0, 9, 9, 9]])
  losses = losses.astype(np.float32)
  state, of_mean = tx.init(START), inner.init(START)
  run = maps.stepper(
    map_name,
    lambda state, g, value: tx.update(g, state, START, value=value),
    state,
    N,
  )
  for value in losses:
    updates, state = run(state, ROWS, value)
    expected, of_mean = inner.update(
      jnp.asarray(ROWS.mean(0)), of_mean, START, value=jnp.mean(value)
    )
    np.testing.assert_allclose(
      updates, np.broadcast_to(expected, (N, 2)), rtol=1e-6
    )
  (scale,) = {float(x) for x in np.ravel(optax.tree.get(state, "scale"))}
  assert scale == 0.125


@maps.both_kinds
def test_the_loss_of_a_dropped_gradient_does_not_count(map_name):
  """It is NaN where the gradient is."""
  tx = optax_dist.sync_replicas(
    optax.polyak_sgd(), maps.AXIS, replicas_to_aggregate=2, total_num_replicas=N
  )

  def step(state, g, value, arrived):
    return tx.update(g, state, START, value=value, arrived=arrived)

  gradients = np.array([[1, 0], [3, 0], [np.nan, 0], [5, 0]], np.float32)
  values = np.array([2, 6, np.nan, 1000], np.float32)
  arrived = np.array([True, True, True, False])
  run = maps.stepper(map_name, step, tx.init(START), N)
  updates, _ = run(tx.init(START), gradients, values, arrived)
  # By Polyak: gradient times value / |gradient|^2 is 2 * 4 / 4; at most 1 times.
  np.testing.assert_allclose(updates, [[-2.0, 0.0]] * N, rtol=1e-6)


@pytest.mark.parametrize("map_name", MAPS)
def test_line_search_uses_the_mean_loss(map_name):
  """A local loss would raise JAX's error, or let parameters drift apart."""
  inner = optax.lbfgs()
  tx = _make("sync_replicas", inner)

  def of_all(params):
    return jnp.mean(jax.vmap(_loss, (None, 0))(params, jnp.asarray(ROWS)))

  def step(state, row):
    own = optax_dist.local_params(jnp.asarray(START), maps.AXIS)
    value, grad = jax.value_and_grad(_loss)(own, row)
    return tx.update(
      grad,
      state,
      START,
      value=value,
      grad=grad,
      value_fn=lambda params: _loss(params, row),
    )

  state = tx.init(START)
  updates, state = maps.stepper(map_name, step, state, N)(state, ROWS)
  value, grad = jax.value_and_grad(of_all)(START)
  expected, of_mean = inner.update(
    grad, inner.init(START), START, value=value, grad=grad, value_fn=of_all
  )
  np.testing.assert_allclose(
    updates, np.broadcast_to(expected, (N, 2)), rtol=1e-5
  )
  np.testing.assert_allclose(
    optax.tree.get(state.inner_state, "value"),
    optax.tree.get(of_mean, "value"),
    rtol=1e-5,
  )


def _scaled_by_argument():
  def update_fn(updates, state, params=None, *, factor, **extra_args):
    del params, extra_args
    factor = factor() if callable(factor) else factor
    return jax.tree.map(lambda g: g * factor, updates), state + factor

  return optax.GradientTransformationExtraArgs(
    lambda _: jnp.zeros([]), update_fn
  )


@jax.numpy_dtype_promotion("standard")  # For MultiSteps.
@pairwise.every_pair(
  map_name=["vmap", "shard_map_vma", "plain_jit"],
  kind=["sync_replicas", "sharded", "per_replica"],
)
def test_other_arguments_must_be_equal_on_all_replicas(map_name, kind):
  tx = _make(kind, _scaled_by_argument())
  state = tx.init(START)

  def step(mean, state, g, factor):
    factor = jax.lax.pmean(factor, maps.AXIS) if mean else factor
    return tx.update(g, state, START, factor=factor)

  factors = np.arange(4, dtype=np.float32)
  own = lambda *args: step(False, *args)
  equal = lambda *args: step(True, *args)
  error = rf"{kind}: `factor` varies.*'data'"
  if map_name == "plain_jit":  # It sees what comes of it.
    error = "parts of the state .* differ between replicas along axis 'data'"
  with pytest.raises(ValueError, match=error):
    maps.stepper(map_name, own, state, N)(state, ROWS, factors)
  updates, _ = maps.stepper(map_name, equal, state, N)(state, ROWS, factors)
  np.testing.assert_allclose(updates, [1.5 * ROWS.mean(0)] * N, rtol=1e-6)


@pytest.mark.parametrize("kind", ["sync_replicas", "sharded"])
def test_return_value_of_a_function_must_be_equal_on_all_replicas(kind):
  tx = _make(kind, _scaled_by_argument())
  state = tx.init(START)

  def step(state, g, factor):
    return tx.update(g, state, START, factor=lambda: factor)

  factors = np.arange(4, dtype=np.float32)
  with pytest.raises(ValueError, match=f"{kind}: the inner state.* vary over"):
    maps.stepper("shard_map_vma", step, state, N)(state, ROWS, factors)


@pytest.mark.parametrize(
  "name", ["elastic_average", "local_updates", "streaming_updates"]
)
def test_line_search_of_a_local_optimizer_uses_the_local_loss(name):
  inner = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))
  tx = every_transform.make(name, inner, N)
  state = tx.init(START)

  def step(state, params, row):
    value, grad = jax.value_and_grad(_loss)(params, row)
    value_fn = lambda params: _loss(params, row)
    return tx.update(
      grad, state, params, value=value, grad=grad, value_fn=value_fn
    )

  params = np.broadcast_to(START, (N, 2))
  for map_name in ("vmap", "shard_map"):
    run = maps.stepper(map_name, step, state, N)
    updates, _ = run(state, params, ROWS)
    for got, row in zip(updates, ROWS, strict=True):
      value, grad = jax.value_and_grad(_loss)(START, row)
      expected, _ = inner.update(
        grad,
        inner.init(START),
        START,
        value=value,
        grad=grad,
        value_fn=lambda params, row=row: _loss(params, row),
      )
      np.testing.assert_allclose(got, expected, rtol=1e-5)
  # JAX can't type optax's loop there.
  with pytest.raises(TypeError, match=f"{name}: .*check_vma=False"):
    maps.stepper("shard_map_vma", step, state, N)(state, params, ROWS)


@pytest.mark.parametrize("name", every_transform.OUTER)
def test_an_outer_optimizer_that_needs_an_argument_is_refused(name):
  tx = every_transform.make(name, optax.sgd(1.0), N, outer=optax.polyak_sgd())
  state = tx.init(START)
  run = maps.stepper(
    "vmap", lambda s, g, p: tx.update(g, s, p, value=1.0), state, N
  )
  with pytest.raises(TypeError, match="`outer`, which gets no keyword arg"):
    run(state, ROWS, ROWS)


def test_an_inner_optimizer_without_its_argument_is_refused():
  tx = _make("sync_replicas", _plateau())
  run = maps.stepper("vmap", lambda s, g: tx.update(g, s), tx.init(START), N)
  with pytest.raises(TypeError, match=r"`inner` needs .*value=loss"):
    run(tx.init(START), ROWS)


def test_a_line_search_can_not_be_sharded():
  inner = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5))
  tx = _make("sharded", inner)

  def step(state, row):
    value, grad = jax.value_and_grad(_loss)(jnp.asarray(START), row)
    value_fn = lambda params: _loss(params, row)
    return tx.update(
      grad, state, START, value=value, grad=grad, value_fn=value_fn
    )

  state = tx.init(START)
  with pytest.raises(ValueError, match="sharded: `inner` can't be sharded"):
    maps.stepper("vmap", step, state, N)(state, ROWS)
