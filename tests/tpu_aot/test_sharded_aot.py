"""Tests of what a training step with sharded becomes on 256 chips, without one."""

import itertools
import math

import aot
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dist

_TOPOLOGY = "v5e:16x16"
_CHIPS = 256
_WIDTHS = [256] * 7


def _params():
  """Returns weights in float32 and biases in bfloat16: two dtypes."""
  return [
    (
      jax.ShapeDtypeStruct((n, m), jnp.float32),
      jax.ShapeDtypeStruct((m,), jnp.bfloat16),
    )
    for n, m in itertools.pairwise(_WIDTHS)
  ]


def _loss(params, x):
  for w, b in params:
    x = jnp.tanh(x @ w + b.astype(x.dtype)[None])
  return jnp.mean(jnp.square(x))


def _lowered(tx, check_vma):
  over = aot.mesh(_TOPOLOGY)
  params = _params()
  state = jax.eval_shape(tx.init, params)
  specs = (P(), optax_dist.states.state_specs(state, aot.AXIS), P(aot.AXIS))

  def step(params, state, x):
    own = optax_dist.local_params(params, aot.AXIS)
    updates, state = tx.update(jax.grad(_loss)(own, x), state, params)
    return optax.apply_updates(params, updates), state

  run = jax.shard_map(
    step, mesh=over, in_specs=specs, out_specs=specs[:2], check_vma=check_vma
  )
  x = jax.ShapeDtypeStruct((8 * over.size, _WIDTHS[0]), jnp.float32)
  place = lambda spec, part: jax.tree.map(
    lambda leaf: jax.ShapeDtypeStruct(
      leaf.shape, leaf.dtype, sharding=NamedSharding(over, spec)
    ),
    part,
  )
  args = jax.tree.map(
    place, specs, (params, state, x), is_leaf=lambda s: isinstance(s, P)
  )
  return jax.jit(run, donate_argnums=(0, 1)).lower(*args), args[1]


def _bytes_per_chip(state):
  """Returns the bytes of a state that each chip holds."""
  return sum(
    math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
    for leaf in jax.tree.leaves(state)
    if leaf.ndim
  )


@pytest.mark.parametrize("check_vma", [False, True])
def test_each_leaf_has_one_message_each_way(check_vma):
  # Adam's promotions need the default.
  with jax.numpy_dtype_promotion("standard"):
    lowered, state = _lowered(
      optax_dist.sharded(
        optax.chain(
          optax_dist.clip_by_global_norm(1.0, aot.AXIS), optax.adam(1e-3)
        ),
        aot.AXIS,
        num_replicas=_CHIPS,
      ),
      check_vma,
    )
  text = lowered.as_text()
  count = lambda op: text.count(f'"stablehlo.{op}"')
  leaves = len(jax.tree.leaves(_params()))
  assert count("reduce_scatter") == count("all_gather") == leaves
  assert count("all_reduce") == 1  # The norm.
  # The compiler makes some of them all-reduces, and no more of them.
  compiled = aot.count_collectives(lowered.compile().as_text())
  assert sum(compiled.values()) <= 2 * leaves + 1
  whole = sum(2 * x.size * x.dtype.itemsize for x in jax.tree.leaves(_params()))
  assert _bytes_per_chip(state) == whole / _CHIPS
