"""Updates of a parameter that is sharded over the replicas, as with FSDP."""

import jax
import jax.numpy as jnp
import maps
from jax.sharding import PartitionSpec as P


def update(tx, size, check_vma):
  """Hands a transformation a gradient that was summed and scattered."""

  def step(w, x):
    loss = lambda w: jnp.mean(x @ jax.lax.all_gather(w, maps.AXIS, tiled=True))
    return tx.update({"w": jax.grad(loss)(w)}, tx.init({"w": w}), {"w": w})[0]

  run = jax.shard_map(
    step,
    mesh=maps.mesh(size),
    in_specs=(P(maps.AXIS), P(maps.AXIS)),
    out_specs=P(maps.AXIS),
    check_vma=check_vma,
  )
  return jax.jit(run)(jnp.ones((2 * size, 2)), jnp.ones((size, 2 * size)))
