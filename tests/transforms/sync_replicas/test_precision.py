"""Rounding: never before or in a sum."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

import optax_dist

N = 4
KINDS = [
  {"replicas_to_aggregate": N},
  {"replicas_to_aggregate": N, "all_arrive": True},
  {"replicas_to_aggregate": 2},
  {"replicas_to_aggregate": 2 * N},
  {"replicas_to_aggregate": 2 * N, "all_arrive": True},
]


def _mean(gradients, params, **kwargs):
  tx = optax_dist.sync_replicas(
    optax.identity(), maps.AXIS, total_num_replicas=N, **kwargs
  )
  state = tx.init(params)
  run = maps.stepper(
    "vmap", lambda state, g: tx.update(g, state, params), state, N
  )
  for _ in range(max(1, kwargs["replicas_to_aggregate"] // N)):
    updates, state = run(state, gradients)
  assert int(state.global_step) == 1
  return updates[0]


@pytest.mark.parametrize("kwargs", KINDS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_float32_gradients_of_narrow_parameters_are_not_rounded(dtype, kwargs):
  g = np.random.default_rng(0).normal(size=(N, 100)).astype(np.float32)
  mean = _mean(g, jnp.zeros(100, dtype), **kwargs)
  assert mean.dtype == np.float32
  np.testing.assert_allclose(mean, g.mean(0), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kwargs", KINDS)
def test_float16_mean_is_finite_even_if_the_sum_would_overflow(
  kwargs,
):
  g = np.full((N, 3), 50000, np.float16)
  mean = _mean(g, jnp.zeros(3, jnp.float16), **kwargs)
  assert mean.dtype == np.float16
  np.testing.assert_array_equal(mean, np.float16(50000))


@maps.both_kinds
@pytest.mark.parametrize(
  ("dtype", "largest"),
  # The documented figures.
  [("float32", 4.25e37), ("bfloat16", 4.23e37), ("float16", 8188)],
)
def test_mean_overflows_where_the_documented_sum_does(map_name, dtype, largest):
  makers = {
    "cross_shard": lambda: optax_dist.cross_shard(maps.AXIS),
    "sync_replicas": lambda: optax_dist.sync_replicas(
      optax.identity(), maps.AXIS, replicas_to_aggregate=8
    ),
  }
  for name, make in makers.items():
    tx = make()
    mean = lambda g, tx=tx: tx.update(g, tx.init(g), g)[0]
    is_wide = (name, dtype) == ("sync_replicas", "float16")
    for size, is_finite in ((largest, True), (1.01 * largest, is_wide)):
      rows = np.full((8, 2), size).astype(jnp.dtype(dtype))
      result = maps.run(map_name, mean, rows, size=8).astype(np.float32)
      assert np.isfinite(result).all() == is_finite
      assert not is_finite or np.allclose(result / size, 1, rtol=1e-2)


def test_the_dtype_of_sums_and_averages_can_be_chosen():
  tx = optax_dist.sync_replicas(
    optax.identity(),
    maps.AXIS,
    replicas_to_aggregate=N,
    total_num_replicas=N,
    accumulator_dtype=jnp.bfloat16,
    variable_averages=0.9,
    averages_dtype=jnp.bfloat16,
  )
  state = tx.init({"r": jnp.zeros(2), "c": jnp.zeros(2, jnp.complex64)})
  total = state.replica.value.gradient_sum
  assert total["r"].dtype == jnp.bfloat16
  assert total["c"].dtype == jnp.complex64
  assert optax.tree.get(state, "averages")["r"].dtype == jnp.bfloat16


def test_averages_of_bfloat16_parameters_converge():
  tx = optax_dist.sync_replicas(
    optax.identity(),
    maps.AXIS,
    replicas_to_aggregate=N,
    total_num_replicas=N,
    variable_averages=0.999,
    all_arrive=True,
  )
  params = jnp.zeros(2, jnp.bfloat16)
  state = tx.init(params)
  axes = optax_dist.states.state_axes(state)
  params += 1
  one = jnp.ones((N, 2), jnp.bfloat16)

  # Parameters at 1 after the first step: 1 - 0.999 ** steps of the way.
  @jax.jit
  def run(state):
    step = lambda state, g: tx.update(g, state, params)[1]
    many = jax.vmap(step, in_axes=(axes, 0), out_axes=axes, axis_name=maps.AXIS)
    return jax.lax.fori_loop(0, 1001, lambda _, state: many(state, one), state)

  state = run(state)
  average = optax.tree.get(state, "averages")
  np.testing.assert_allclose(average, 1 - 0.999**1000, rtol=1e-4)
  assert optax_dist.averaged_params(state, params).dtype == jnp.bfloat16


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_nonfinite_gradient_does_not_drop_others_if_all_are_needed(bad):
  """The sum tells that something is not finite; then each is looked at."""
  tx = optax_dist.sync_replicas(
    optax.identity(),
    maps.AXIS,
    replicas_to_aggregate=N,
    total_num_replicas=N,
    max_staleness=None,
  )
  state = tx.init(np.float32(0))
  run = maps.stepper("vmap", lambda state, g: tx.update(g, state), state, N)
  updates, state = run(state, np.float32([1, 2, bad, 4]))
  np.testing.assert_array_equal(updates, 0)
  report = optax_dist.sync_report(state)
  np.testing.assert_array_equal(report.accumulated, [1, 1, 0, 1])
  np.testing.assert_array_equal(report.dropped["nonfinite"], [0, 0, 1, 0])
  updates, state = run(state, np.float32([10, bad, 30, -bad]))
  np.testing.assert_allclose(updates, (1 + 2 + 4 + 10 + 30) / 5)
  updates, state = run(state, np.float32([1, 2, 3, 4]))
  np.testing.assert_allclose(updates, 2.5)
  report = optax_dist.sync_report(state)
  np.testing.assert_array_equal(report.accumulated, 0)
  np.testing.assert_array_equal(report.accepted, [3, 2, 2, 2])
