"""Tests of what a training step with cross_shard becomes on TPU, without one."""

import itertools

import aot
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_dist
from optax_dist._internal import axes

# Many leaves, and few that are large enough for temporaries.
_MODELS = {"small": [256] * 7, "large": [4096, 4096]}
_BATCH = 256
_TOPOLOGY = "v5e:16x16"


def _params(model):
  """Returns weights in float32 and biases in bfloat16: two dtypes."""
  return [
    (
      jax.ShapeDtypeStruct((n, m), jnp.float32),
      jax.ShapeDtypeStruct((m,), jnp.bfloat16),
    )
    for n, m in itertools.pairwise(_MODELS[model])
  ]


def _loss(params, x):
  for w, b in params:
    x = jnp.tanh(x @ w + b.astype(x.dtype)[None])
  return jnp.mean(jnp.square(x))


def _compiled(
  topology, model, aggregate, *, check_vma, local=lambda params: params
):
  """Compiles a step in which ``aggregate`` is the only communication."""
  tx = optax.sgd(0.1, momentum=0.9)

  def step(params, state, x):
    assert axes.platform() == "tpu"
    gradient = aggregate(jax.grad(_loss)(local(params), x))
    updates, state = tx.update(gradient, state, params)
    return optax.apply_updates(params, updates), state

  chips = aot.mesh(topology).size
  x = jax.ShapeDtypeStruct((_BATCH * chips, _MODELS[model][0]), jnp.float32)
  params = _params(model)
  return aot.compile_for(
    topology,
    step,
    (params, jax.eval_shape(tx.init, params), x),
    (P(), P(), P(aot.AXIS)),
    P(),
    check_vma=check_vma,
    donate_argnums=(0, 1),
  )


def _cross_shard(gradient):
  tx = optax_dist.cross_shard(aot.AXIS)
  return tx.update(gradient, tx.init(gradient))[0]


def _pmean(gradient):
  return jax.lax.pmean(gradient, aot.AXIS)


def _divide(gradient):
  size = jax.lax.axis_size(aot.AXIS)
  return jax.tree.map(lambda g: g / jnp.asarray(size, g.dtype), gradient)


def _local_by_hand(params):
  return jax.lax.pcast(params, aot.AXIS, to="varying")


def _local(params):
  return optax_dist.local_params(params, aot.AXIS)


def _assert_no_worse(got, by_hand):
  count = aot.count_collectives(got.as_text())
  assert set(count) == {"all-reduce"}
  assert count["all-reduce"] <= 2  # One for each dtype.
  by_hand_count = aot.count_collectives(by_hand.as_text())
  assert count["all-reduce"] <= by_hand_count["all-reduce"]
  assert aot.temporaries(got) <= aot.temporaries(by_hand)
  # Nothing is joined by hand where the compiler does so itself.
  for op in ("copy", "concatenate"):
    assert (
      aot.count_ops(got.as_text())[op] <= aot.count_ops(by_hand.as_text())[op]
    )


@pytest.mark.parametrize("topology", ["v4:4x4x4", "v5p:4x4x4", "v6e:16x16"])
def test_each_dtype_has_one_all_reduce(topology):
  _assert_no_worse(
    _compiled(topology, "small", _cross_shard, check_vma=False),
    _compiled(topology, "small", _pmean, check_vma=False),
  )


@pytest.mark.parametrize("model", _MODELS)
class TestOn256Chips:
  """The three ways to a mean gradient, each against the same by hand."""

  def test_untracked_map_compiles_to_one_all_reduce(self, model):
    _assert_no_worse(
      _compiled(_TOPOLOGY, model, _cross_shard, check_vma=False),
      _compiled(_TOPOLOGY, model, _pmean, check_vma=False),
    )

  def test_tracked_local_gradients_compile_to_one_all_reduce(self, model):
    _assert_no_worse(
      _compiled(_TOPOLOGY, model, _cross_shard, check_vma=True, local=_local),
      _compiled(_TOPOLOGY, model, _pmean, check_vma=True, local=_local_by_hand),
    )

  def test_tracked_summed_gradients_need_no_further_all_reduce(self, model):
    """They arrive summed: by hand one divides, for pmean is wrong there."""
    _assert_no_worse(
      _compiled(_TOPOLOGY, model, _cross_shard, check_vma=True),
      _compiled(_TOPOLOGY, model, _divide, check_vma=True),
    )

  def test_a_second_mean_costs_nothing(self, model):
    def twice(gradient):
      return _cross_shard(_cross_shard(gradient))

    _assert_no_worse(
      _compiled(_TOPOLOGY, model, twice, check_vma=True, local=_local),
      _compiled(_TOPOLOGY, model, _pmean, check_vma=True, local=_local_by_hand),
    )


@pytest.mark.parametrize("check_vma", [False, True])
def test_gradients_in_shards_are_not_summed_again(check_vma):
  """Gathered weights, replicated biases."""
  specs = {"w": P(aot.AXIS), "b": P()}
  params = {
    "w": jax.ShapeDtypeStruct((4096, 4096), jnp.float32),
    "b": jax.ShapeDtypeStruct((4096,), jnp.float32),
  }
  x = jax.ShapeDtypeStruct((256 * 8, 4096), jnp.float32)
  tx = optax_dist.cross_shard(aot.AXIS, param_specs=specs)

  def loss(params, x):
    w = jax.lax.all_gather(params["w"], aot.AXIS, tiled=True)
    return jnp.mean(jnp.square(x @ w + params["b"][None]))

  def by_hand(gradient):
    size = np.float32(aot.mesh(_TOPOLOGY).size)
    return {"w": gradient["w"] / size, "b": _pmean(gradient["b"])}

  def compiled(aggregate):
    def step(w, b, x):
      own = optax_dist.local_params({"w": w, "b": b}, aot.AXIS)
      gradient = aggregate(jax.grad(loss)(own, x))
      return w - gradient["w"], b - gradient["b"]

    return aot.compile_for(
      _TOPOLOGY,
      step,
      (params["w"], params["b"], x),
      (specs["w"], specs["b"], P(aot.AXIS)),
      (specs["w"], specs["b"]),
      check_vma=check_vma,
    )

  ours = compiled(lambda g: tx.update(g, tx.init(g))[0])
  theirs = compiled(by_hand)
  expected = aot.count_collectives(theirs.as_text())
  assert expected["all-gather"] == 1
  assert aot.count_collectives(ours.as_text()) == expected
  assert aot.temporaries(ours) <= aot.temporaries(theirs)
