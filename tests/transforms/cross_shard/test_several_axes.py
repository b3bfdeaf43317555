"""Tests of cross_shard over several axes at once."""

import functools
import itertools

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import optax_dist


def _update(tx, updates, params=None):
  return tx.update(updates, tx.init(updates), params)[0]


def _two_axis_maps():
  def nested_vmap(fn):
    inner = jax.vmap(fn, axis_name="model")
    return jax.jit(jax.vmap(inner, axis_name="data"))

  def over_mesh(fn, check_vma, kind):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind,) * 2)
    body = lambda x: fn(x[0, 0])[None, None]
    run = jax.jit(
      jax.shard_map(
        body,
        mesh=mesh,
        in_specs=P("data", "model"),
        out_specs=P("data", "model"),
        check_vma=check_vma,
      )
    )
    spec = NamedSharding(mesh, P("data", "model"))
    return lambda x: run(jax.device_put(x, spec))

  yield "nested_vmap", nested_vmap
  for check_vma, kind in itertools.product(
    [0, 1], [AxisType.Auto, AxisType.Explicit]
  ):
    yield (
      f"shard_map-{check_vma}-{kind.name}",
      functools.partial(over_mesh, check_vma=bool(check_vma), kind=kind),
    )
  yield "vmap_in_shard_map", _vmap_in_mesh(check_vma=False)


def _vmap_in_mesh(check_vma):
  return lambda fn: jax.jit(
    jax.shard_map(
      lambda x: jax.vmap(fn, axis_name="model")(x[0])[None],
      mesh=maps.mesh(4),
      in_specs=P("data"),
      out_specs=P("data"),
      check_vma=check_vma,
    )
  )


TWO_AXIS_MAPS = dict(_two_axis_maps())


@pytest.mark.parametrize("map_name", TWO_AXIS_MAPS)
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_several_axes_are_reduced_together(map_name, reduction):
  x = np.random.default_rng(3).normal(size=(4, 2, 5)).astype(np.float32)
  for names, axis in [(("data", "model"), (0, 1)), (["model"], 1), ("data", 0)]:
    tx = optax_dist.cross_shard(names, reduction=reduction)
    got = TWO_AXIS_MAPS[map_name](functools.partial(_update, tx))(x)
    expected = np.broadcast_to(
      getattr(np, reduction)(x, axis=axis, keepdims=True), x.shape
    )
    np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_update_summed_over_one_of_two_axes_is_reduced_over_both(reduction):
  """The parameter is replicated over data and sharded over model."""
  mesh = jax.make_mesh(
    (4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  w = np.arange(2, dtype=np.float32)
  x = np.random.default_rng(4).normal(size=(4, 2)).astype(np.float32)
  tx = optax_dist.cross_shard(("data", "model"), reduction=reduction)

  def step(w, x):
    return _update(tx, jax.grad(lambda w: jnp.sum(w * x[0]))(w), w)

  got = jax.jit(
    jax.shard_map(
      step, mesh=mesh, in_specs=(P("model"), P("data", "model")), out_specs=P()
    )
  )(w, x)
  np.testing.assert_allclose(got, [getattr(np, reduction)(x)], rtol=1e-5)
