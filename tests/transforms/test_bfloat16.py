"""Sums of bfloat16 on a mesh with an axis that is not mapped.

XLA for CPUs aborts the process when it compiles one.
"""

import functools

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_dist

N = 2
ROWS = np.arange(8, dtype=np.float32).reshape(N, 4)
MEAN = ROWS.mean(0)
TRANSFORMS = {
  "mean": (lambda: optax_dist.cross_shard(maps.AXIS), MEAN),
  "groups": (
    lambda: optax_dist.cross_shard(maps.AXIS, axis_index_groups=[[1, 0]]),
    MEAN,
  ),
  "sharded": (
    lambda: optax_dist.sharded(optax.sgd(1.0), maps.AXIS, num_replicas=N),
    -MEAN,
  ),
  "sync_replicas": (
    lambda: optax_dist.sync_replicas(
      optax.sgd(1.0),
      maps.AXIS,
      replicas_to_aggregate=N,
      accumulator_dtype=jnp.bfloat16,
    ),
    -MEAN,
  ),
}


def _map(fun, in_specs, check_vma, model=2):
  mesh = jax.make_mesh(
    (N, model), (maps.AXIS, "model"), axis_types=(AxisType.Auto,) * 2
  )
  return jax.jit(
    jax.shard_map(
      fun,
      mesh=mesh,
      in_specs=in_specs,
      out_specs=P(),
      axis_names={maps.AXIS},
      check_vma=check_vma,
    )
  )


@pytest.mark.parametrize("check_vma", [False, True])
@pytest.mark.parametrize("kind", TRANSFORMS)
def test_local_gradients_are_averaged(kind, check_vma):
  make, expected = TRANSFORMS[kind]
  tx = make()

  def update(rows):
    params = jnp.zeros(4, jnp.bfloat16)
    updates, _ = tx.update(rows[0], tx.init(params), params)
    # Equal on all replicas, which types show for some transformations only.
    return jax.lax.pmax(updates.astype(jnp.float32), maps.AXIS)

  # An axis of one device is one too.
  run = _map(update, P(maps.AXIS), check_vma, model=1 + check_vma)
  np.testing.assert_array_equal(run(jnp.asarray(ROWS, jnp.bfloat16)), expected)


def test_gradient_summed_by_jax_is_refused():
  tx = optax_dist.cross_shard(maps.AXIS)

  def update(own, params, rows):
    params = optax_dist.local_params(params, maps.AXIS) if own else params
    gradient = jax.grad(lambda w: jnp.sum(w * rows[0]))(params)
    return tx.update(gradient, tx.init(params))[0]

  args = jnp.zeros(4, jnp.bfloat16), jnp.asarray(ROWS, jnp.bfloat16)
  run = lambda own: _map(
    functools.partial(update, own), (P(), P(maps.AXIS)), True
  )(*args)
  with pytest.raises(NotImplementedError, match=r"bfloat16.*local_params"):
    run(False)
  np.testing.assert_array_equal(np.asarray(run(True), np.float32), MEAN)
