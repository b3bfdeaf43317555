"""Tests of cross_shard on gradients of parameters sharded over the same axis."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pairwise
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_dist

N = 4
AXIS = "data"
RNG = np.random.default_rng(0)
PARAMS = {
  "w": RNG.normal(size=(8, 2)).astype(np.float32),
  "b": RNG.normal(size=2).astype(np.float32),
}
X = RNG.normal(size=(4 * N, 8)).astype(np.float32)
SPECS = {"w": P(AXIS), "b": P()}

every_check = pytest.mark.parametrize("check_vma", [False, True])


def _loss(params, x):
  return jnp.mean(jnp.square(x @ params["w"] + params["b"][None]))


MEAN = jax.grad(_loss)(PARAMS, X)


def _gathered_loss(params, x):
  w = jax.lax.all_gather(params["w"], AXIS, tiled=True)
  return _loss({**params, "w": w}, x)


def _run(
  tx, check_vma, *, own=True, specs=SPECS, between=lambda g: g, jit=True
):
  """Returns the whole updates of a step with the weights in shards."""
  mesh = jax.make_mesh(
    (N,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:N]
  )

  def step(params, x):
    at = optax_dist.local_params(params, AXIS) if own else params
    gradient = between(jax.grad(_gathered_loss)(at, x))
    return tx.update(gradient, tx.init(params), params)[0]

  run = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(specs, P(AXIS)),
    out_specs=specs,
    check_vma=check_vma,
  )
  return (jax.jit(run) if jit else run)(PARAMS, X)


@pairwise.every_pair(
  check_vma=[False, True],
  own=[False, True],
  reduction=["mean", "sum"],
  param_specs=[SPECS, {"w": P(AXIS), "b": None}, lambda updates: {**SPECS}],
)
def test_a_shard_is_not_summed_again(check_vma, own, reduction, param_specs):
  tx = optax_dist.cross_shard(
    AXIS, reduction=reduction, param_specs=param_specs
  )
  got = _run(tx, check_vma, own=own)
  factor = np.float32(N if reduction == "sum" else 1)
  for key, mean in MEAN.items():
    np.testing.assert_allclose(got[key], factor * mean, rtol=1e-5, atol=1e-6)


@pairwise.every_pair(
  check_vma=[False, True],
  between=[
    lambda g: g,
    lambda g: jax.tree.map(lambda x: 0.5 * x, g),
    lambda g: optax.clip(1.0).update(g, optax.EmptyState())[0],
    lambda g: jax.tree.map(
      lambda x: x.astype(jnp.bfloat16).astype(jnp.float32), g
    ),
    lambda g: jax.tree.map(lambda x: jnp.concatenate([x[:1], x[1:]]), g),
    lambda g: jax.tree.map(lambda x: jnp.arctanh(jnp.tanh(x)), g),
    lambda g: jax.tree.map(lambda x: jnp.flip(jnp.sign(x) * x**2), g),
  ],
  param_specs=[None, P(), {"w": P(), "b": P()}],
)
def test_a_shard_without_its_spec_is_refused(check_vma, between, param_specs):
  tx = optax_dist.cross_shard(AXIS, param_specs=param_specs)
  with pytest.raises(ValueError, match="param_specs") as info:
    _run(tx, check_vma, between=between)
  assert "updates['w']" in str(info.value)
  assert "'data'" in str(info.value)


@pairwise.every_pair(
  check_vma=[False, True],
  own=[False, True],
  first=["mean", "sum"],
  second=["mean", "sum"],
)
def test_a_second_cross_shard_treats_shards_as_reduced_already(
  check_vma, own, first, second
):
  """It divided the shards once more, and left the rest alone."""
  chained = optax.chain(
    optax_dist.cross_shard(AXIS, reduction=first, param_specs=SPECS),
    optax.scale(0.5),
    optax.clip(1e3),
    optax_dist.cross_shard(AXIS, reduction=second, param_specs=SPECS),
  )
  got = _run(chained, check_vma, own=own)
  factor = 0.5 * N ** (first, second).count("sum")
  for key, mean in MEAN.items():
    np.testing.assert_allclose(
      got[key], np.float32(factor) * mean, rtol=1e-5, atol=1e-6
    )


@every_check
def test_a_shard_without_specs_is_refused_outside_of_jit(check_vma):
  """There is no program there, which would show that it was scattered."""
  run = lambda **kwargs: _run(
    optax_dist.cross_shard(AXIS, **kwargs), check_vma, jit=False
  )
  with pytest.raises(ValueError, match=r"updates\['b'\] .* outside of jax.jit"):
    run()
  if check_vma:
    got = run(param_specs=SPECS)
    np.testing.assert_allclose(got["w"], MEAN["w"], rtol=1e-5, atol=1e-6)


def test_a_replicated_gradient_with_the_spec_of_a_shard_is_refused():
  tx = optax_dist.cross_shard(AXIS, param_specs={"w": P(AXIS), "b": P(AXIS)})
  with pytest.raises(ValueError, match=r"updates\['b'\] does not vary"):
    _run(tx, check_vma=True, own=False)


@every_check
def test_shards_over_one_axis_are_averaged_over_another(check_vma):
  """Hybrid sharding: summed and scattered in a row, summed here over rows."""
  mesh = jax.make_mesh((2, N), ("row", AXIS), axis_types=(AxisType.Auto,) * 2)
  specs = {"w": P((AXIS, "model"), None), "b": P()}
  tx = optax.chain(
    optax_dist.cross_shard(("row", AXIS), param_specs=specs), optax.sgd(1.0)
  )
  placed = {"w": P(AXIS), "b": P()}

  def step(params, x):
    at = optax_dist.local_params(params, ("row", AXIS))
    gradient = jax.grad(_gathered_loss)(at, x)
    return tx.update(gradient, tx.init(params), params)[0]

  run = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(placed, P(("row", AXIS))),
    out_specs=placed,
    check_vma=check_vma,
  )
  got = jax.jit(run)(PARAMS, X)
  for key, mean in MEAN.items():
    np.testing.assert_allclose(got[key], -mean, rtol=1e-5, atol=1e-6)


@every_check
def test_frozen_parameters_need_no_spec(check_vma):
  tx = optax_dist.cross_shard(AXIS, param_specs={"w": P(AXIS), "b": P()})
  only = optax.masked(tx, {"w": True, "b": False})
  got = _run(only, check_vma, own=False, specs={"w": P(AXIS), "b": P()})
  np.testing.assert_allclose(got["w"], MEAN["w"], rtol=1e-5, atol=1e-6)


def test_specs_of_another_structure_are_refused():
  tx = optax_dist.cross_shard(AXIS, param_specs={"w": P(AXIS)})
  with pytest.raises(ValueError, match="must be a pytree of PartitionSpec"):
    _run(tx, check_vma=False)


def test_groups_of_shards_are_refused():
  with pytest.raises(ValueError, match="can't be combined"):
    optax_dist.cross_shard(
      AXIS, param_specs=SPECS, axis_index_groups=[[0, 1], [2, 3]]
    )


def test_sparse_updates_of_shards_are_refused():
  tx = optax_dist.cross_shard(AXIS, param_specs=P(AXIS))
  slices = lambda g: optax_dist.IndexedSlices(
    g["b"][None], jnp.zeros(1, jnp.int32), (4, 2)
  )
  with pytest.raises(ValueError, match="is sparse"):
    _run(tx, check_vma=False, between=slices)
