"""Tests of computing in the shape that arrays are stored in."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pytest

from optax_dist._internal.leaves.on_blocks import on_blocks
from optax_dist._internal.replica_blocks import block, row

N = 2


def _args(tx):
  draw = np.random.default_rng(0).normal
  tree = lambda: {"w": draw(size=(3, 2)), "b": draw(size=3), "none": None}
  params, grads = (
    jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), tree()) for _ in "ab"
  )
  return grads, tx.init(params), params


_INNERS = {
  "adamw": (optax.adamw(1e-2), True),
  "momentum": (optax.sgd(optax.linear_schedule(0.1, 0, 10), 0.9), True),
  "injected": (optax.inject_hyperparams(optax.sgd)(learning_rate=0.1), True),
  # Mix the elements of a leaf, or decide.
  "clipped": (optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1)), False),
  "factored": (optax.adafactor(1e-2, min_dim_size_to_factor=2), False),
  "accumulated": (optax.MultiSteps(optax.adam(1e-2), 2), False),
}


@jax.numpy_dtype_promotion("standard")  # Which some of optax need.
@pytest.mark.parametrize("name", _INNERS)
@pytest.mark.parametrize("map_name", ["shard_map", "shard_map_vma"])
def test_results_are_the_same(name, map_name):
  tx = optax.with_extra_args_support(_INNERS[name][0])
  stacked = jax.tree.map(lambda x: jnp.stack([x] * N), _args(tx))
  found = [
    maps.run(map_name, fun, *stacked, size=N)
    for fun in (tx.update, lambda *args: on_blocks(tx.update, *args))
  ]
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7), *found
  )
  types = [jax.tree.map(lambda x: (x.shape, x.dtype), x) for x in found]
  assert types[0] == types[1]


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("name", _INNERS)
def test_what_is_done_element_by_element_is_done_on_blocks(name):
  tx, is_plain = _INNERS[name]
  tx = optax.with_extra_args_support(tx)
  args = _args(tx)

  def update(*args):
    return block(on_blocks(tx.update, *row(args)))

  stacked = jax.tree.map(lambda x: jnp.stack([x] * N), args)
  program = str(
    jax.make_jaxpr(
      maps.mapped("shard_map", lambda *args: update(*block(args)), stacked, N)
    )(*stacked)
  )
  products = [
    line for line in program.splitlines() if "= mul " in line and "3,2]" in line
  ]
  assert products
  assert any("[1,3,2]" in line for line in products) == is_plain


@jax.numpy_dtype_promotion("standard")
def test_scalars_stay_scalars():
  """XLA has two kernels to divide by an array of one element."""
  stacked = jax.tree.map(lambda x: jnp.stack([x] * N), _args(optax.adam(1e-2)))
  update = lambda *args: on_blocks(optax.adam(1e-2).update, *args)
  mapped = maps.mapped("shard_map", update, stacked, N)
  program = str(jax.make_jaxpr(mapped)(*stacked)).splitlines()
  powers = [line for line in program if "= pow " in line]
  assert powers
  assert not any("[1]" in line for line in powers)


def test_the_bytes_of_a_scalar_have_an_axis():
  def fun(x, scalar):
    first = jax.lax.bitcast_convert_type(scalar, jnp.uint8)
    return x * first[0].astype(x.dtype), first

  args = jnp.ones((N, 3)), jnp.arange(1.0, N + 1)
  found = [
    maps.run("shard_map", f, *args, size=N)
    for f in (fun, lambda *args: on_blocks(fun, *args))
  ]
  jax.tree.map(np.testing.assert_array_equal, *found)
