"""Tests of sharded optimizer state, against the same without shards."""

import re

import chex
import jax
import jax.numpy as jnp
import maps
import numpy as np
import optax
import pairwise
import pytest
import scattered
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import optax_dist
from optax_dist import optimizers
from optax_dist._internal import parts

N = 4
TICKS = 3
#: One leaf divides by N, one is padded, and one is a scalar.
PARAMS = {
  "w": np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4),
  "b": np.linspace(0, 1, 7, dtype=np.float32),
  "s": np.float32(0.5),
  "none": None,
}
_WEIGHTS_ONLY = {"w": True, "b": False, "s": False, "none": None}

INNER = {
  "momentum": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
  "adamw_by_name": lambda: optax.adamw(0.1, mask=_WEIGHTS_ONLY),
  "schedule": lambda: optax.adam(optax.cosine_decay_schedule(0.1, 10)),
  "inject_hyperparams": lambda: optax.inject_hyperparams(optax.rmsprop)(
    learning_rate=0.1
  ),
  "partition_by_name": lambda: optax.partition(
    {"adam": optax.adam(0.1), "freeze": optax.set_to_zero()},
    {"w": "adam", "b": "freeze", "s": "adam", "none": "adam"},
  ),
  "adagrad_of_tensorflow": lambda: optimizers.adagrad(0.1),
  "multi_steps": lambda: optax.MultiSteps(
    optax.adam(0.1), 2
  ).gradient_transformation(),
}


def _gradients(dtype=np.float32):
  rng = np.random.default_rng(0)
  draw = lambda x: rng.normal(size=(TICKS, N, *np.shape(x))).astype(dtype)
  return jax.tree.map(draw, PARAMS)


def _at(t, gradients):
  return jax.tree.map(lambda x: x[t], gradients)


def _by_one(inner, gradients, params=PARAMS, reduce=np.mean):
  """Yields the parameters of one device that has the whole batch."""
  state = inner.init(params)
  for t in range(TICKS):
    total = jax.tree.map(lambda x: reduce(x, axis=0), _at(t, gradients))
    updates, state = inner.update(total, state, params)
    params = optax.apply_updates(params, updates)
    yield params


def _stepper(map_name, tx, state, size=N):
  def step(state, gradients, params):
    updates, state = tx.update(gradients, state, params)
    return optax.apply_updates(params, updates), state

  return maps.stepper(map_name, step, state, size)


def _stacked(params):
  return jax.tree.map(lambda x: np.stack([x] * N), params)


def _check(map_name, tx, inner, reduce=np.mean):
  gradients, state, params = _gradients(), tx.init(PARAMS), _stacked(PARAMS)
  run = _stepper(map_name, tx, state)
  for t, expected in enumerate(_by_one(inner, gradients, reduce=reduce)):
    params, new_state = run(state, _at(t, gradients), params)
    chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
    state = new_state
    chex.assert_trees_all_close(
      params, _stacked(expected), rtol=2e-5, atol=2e-6
    )
  return state


@jax.numpy_dtype_promotion("standard")  # As Adam needs.
@pairwise.every_value(map_name=maps.NAMES, name=["momentum", "adamw_by_name"])
def test_sharded_updates_equal_unsharded_updates(map_name, name):
  _check(
    map_name,
    optax_dist.sharded(INNER[name](), maps.AXIS, num_replicas=N),
    INNER[name](),
  )


@jax.numpy_dtype_promotion("standard")
@pairwise.every_value(
  map_name=["vmap", "shard_map", "shard_map_vma"], name=list(INNER)
)
def test_elementwise_transforms_can_be_sharded(map_name, name):
  tx = optax_dist.sharded(INNER[name](), maps.AXIS, num_replicas=N)
  _check(map_name, tx, INNER[name]())


@pytest.mark.parametrize("map_name", ["vmap", "shard_map", "shard_map_vma"])
def test_sharded_sum_equals_the_unsharded_sum(map_name):
  inner = optax.sgd(0.1, momentum=0.9)
  tx = optax_dist.sharded(inner, maps.AXIS, reduction="sum", num_replicas=N)
  _check(map_name, tx, inner, np.sum)


@maps.both_kinds
def test_global_norm_covers_all_shards(map_name):
  make = lambda clip: optax.chain(clip, optax.sgd(0.1, momentum=0.9))
  ours = optax_dist.clip_by_global_norm(0.1, maps.AXIS)
  tx = optax_dist.sharded(make(ours), maps.AXIS, num_replicas=N)
  _check(map_name, tx, make(optax.clip_by_global_norm(0.1)))


@maps.both_kinds
def test_state_made_inside_the_map_is_the_same(map_name):
  tx = optax_dist.sharded(optax.trace(0.9), maps.AXIS, num_replicas=N)

  def step(gradient):
    state = tx.init(PARAMS)
    updates, state = tx.update(gradient, state, PARAMS)
    return updates, jax.tree.map(jnp.ravel, state.inner_state.trace)

  gradients = _at(0, _gradients())
  updates, traces = maps.run(map_name, step, gradients, size=N)
  mean = jax.tree.map(lambda x: np.mean(x, axis=0), gradients)
  chex.assert_trees_all_close(updates, _stacked(mean), rtol=1e-5)
  for name, x in mean.items():
    if x is not None:
      rows = jnp.ravel(parts.rows(jnp.asarray(x), N))
      np.testing.assert_allclose(np.ravel(traces[name].value), rows, rtol=1e-5)


@maps.both_kinds
def test_leaves_are_split_whatever_their_sizes(map_name):
  params = [jnp.ones(s) for s in ((0, 3), (5,), (2, 3), (6,), (3, 0), (1,))]
  tx = optax_dist.sharded(optax.trace(0.9), maps.AXIS, num_replicas=N)
  trace = tx.init(params).inner_state.trace
  assert [x.value.shape for x in trace] == [
    *((N, 1, 1), (N, 2), (N, 2, 1), (N, 2), (N, 1, 1), (N, 1))
  ]
  rng = np.random.default_rng(0)
  gradients = [rng.normal(size=(N, *x.shape)) for x in params]
  gradients = [g.astype(np.float32) for g in gradients]
  run = maps.stepper(
    map_name, lambda s, *g: tx.update([*g], s, params), tx.init(params), N
  )
  updates, _ = run(tx.init(params), *gradients)
  for update, g in zip(updates, gradients, strict=True):
    assert update.shape == g.shape
    np.testing.assert_allclose(
      update, np.broadcast_to(g.mean(axis=0), g.shape), rtol=1e-5, atol=1e-6
    )


@pytest.mark.parametrize(
  "inner",
  [
    optax.adagrad(0.1),
    optax.radam(0.1),
    optax.rprop(0.1),
    optax.adan(0.1),
    optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation(),
    optimizers.adagrad(0.1),
    optimizers.ftrl(0.1),
  ],
)
@jax.numpy_dtype_promotion("standard")
def test_empty_leaf_does_not_change_other_leaves(inner):
  with_it = {"w": jnp.ones((2, 3)), "empty": jnp.ones((0, 3))}
  without = {"w": with_it["w"]}
  tx = optax_dist.sharded(inner, maps.AXIS, num_replicas=N)
  result = []
  for params in (with_it, without):
    state = tx.init(params)
    run = maps.stepper(
      "vmap", lambda s, g, p=params: tx.update(g, s, p), state, N
    )
    gradients = jax.tree.map(lambda x: jnp.stack([x] * N), params)
    updates, state = run(state, gradients)
    updates, _ = run(state, gradients)
    result.append(updates["w"])
  np.testing.assert_array_equal(*result)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (1, 3), (5, 1), (0, 3)])
def test_leaves_with_fewer_elements_than_replicas_are_averaged(shape):
  inner = optax.chain(optax.sgd(0.5), optax_dist.params_ema(0.5))
  tx = optax_dist.sharded(inner, maps.AXIS, num_replicas=N)
  params, gradient = jnp.ones(shape), jnp.full((N, *shape), 2.0)
  run = maps.stepper(
    "vmap", lambda s, g: tx.update(g, s, params), tx.init(params), N
  )
  updates, state = run(tx.init(params), gradient)
  after = params + updates[0]
  np.testing.assert_array_equal(after, jnp.zeros(shape))
  averages = optax_dist.averaged_params(state, after)
  np.testing.assert_array_equal(averages, jnp.full(shape, 0.5))


@pytest.mark.parametrize("check_vma", [False, True])
def test_state_may_be_sharded_over_several_axes(check_vma):
  names = ("a", "b")
  mesh = jax.make_mesh((2, 2), names, axis_types=(AxisType.Auto,) * 2)
  tx = optax_dist.sharded(optax.trace(0.9), names, num_replicas=N)
  state = tx.init(PARAMS)
  specs = optax_dist.states.state_specs(state, names)

  def step(gradient, state):
    return tx.update(jax.tree.map(lambda x: x[0], gradient), state, PARAMS)

  run = jax.shard_map(
    step,
    mesh=mesh,
    in_specs=(P(names), specs),
    out_specs=(P(), specs),
    check_vma=check_vma,
  )
  gradients = _at(0, _gradients())
  updates, state = jax.jit(run)(gradients, state)
  mean = jax.tree.map(lambda x: np.mean(x, axis=0), gradients)
  chex.assert_trees_all_close(updates, mean, rtol=1e-5)
  trace = state.inner_state.trace["w"].value
  rows = parts.rows(jnp.asarray(mean["w"]), N)
  np.testing.assert_allclose(trace, rows, rtol=1e-5)


def test_vmap_axis_may_surround_a_mesh_axis():
  tx = optax_dist.sharded(optax.sgd(1.0), ("outer", maps.AXIS))
  params = jnp.zeros(11)

  def step(gradient):
    return tx.update(gradient[0], tx.init(params), params)[0][None]

  over_mesh = jax.shard_map(
    step,
    mesh=maps.mesh(2),
    in_specs=P(maps.AXIS),
    out_specs=P(maps.AXIS),
    check_vma=False,
  )
  gradients = np.random.default_rng(0).normal(size=(3, 2, 11))
  run = jax.jit(jax.vmap(over_mesh, axis_name="outer"))
  updates = run(np.float32(gradients))
  mean = np.broadcast_to(gradients.mean((0, 1)), updates.shape)
  np.testing.assert_allclose(updates, -mean, rtol=1e-5)


@jax.numpy_dtype_promotion("standard")
@pytest.mark.parametrize("check_vma", [False, True])
def test_model_shards_do_not_change_sharded_updates(check_vma):
  """Parameters sharded over a model axis, state over both, the norm too."""
  mesh = jax.make_mesh(
    (2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2
  )
  params = {"w": np.ones((6, 8), np.float32), "b": np.ones(3, np.float32)}
  param_specs = {"w": P(None, "model"), "b": P()}
  make = lambda clip: optax.chain(clip, optax.adam(0.1))
  clip = optax_dist.clip_by_global_norm(
    0.5, ("data", "model"), param_specs=None if check_vma else param_specs
  )
  tx = optax_dist.sharded(make(clip), "data", num_replicas=2)
  specs = optax_dist.states.state_specs(
    jax.eval_shape(tx.init, params), "data", param_specs=param_specs
  )
  mu = specs.inner_state[1][0].mu
  assert mu["w"].value == P("data", None, "model")
  assert mu["b"].value == P("data")
  own_map = lambda fn, ins, outs: jax.jit(
    jax.shard_map(
      fn, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=check_vma
    )
  )
  state = own_map(tx.init, (param_specs,), specs)(params)
  rng = np.random.default_rng(0)
  gradients = {
    n: rng.normal(size=(2, *x.shape)).astype(np.float32)
    for n, x in params.items()
  }
  with_replicas = {n: P("data", *s) for n, s in param_specs.items()}

  def step(gradient, state, params):
    gradient = jax.tree.map(lambda x: x[0], gradient)
    return tx.update(gradient, state, params)

  run = own_map(step, (with_replicas, specs, param_specs), (param_specs, specs))
  inner = make(optax.clip_by_global_norm(0.5))
  one = inner.init(params)
  mean = jax.tree.map(lambda x: x.mean(axis=0), gradients)
  for _ in range(2):
    updates, state = run(gradients, state, params)
    expected, one = inner.update(mean, one, params)
    chex.assert_trees_all_close(updates, expected, rtol=1e-4, atol=1e-6)
  shards = state.inner_state[1][0].mu["w"].value.addressable_shards
  assert {shard.data.shape for shard in shards} == {(1, 3, 2)}


@pytest.mark.parametrize("check_vma", [False, True])
def test_one_message_each_way_per_leaf(check_vma):
  params = {
    "w": jnp.ones((8, 8)),
    "b": jnp.ones(5),
    "half": jnp.ones((4, 4), jnp.bfloat16),
    "half_b": jnp.ones(3, jnp.bfloat16),
  }
  tx = optax_dist.sharded(
    optax.sgd(0.1, momentum=0.9), maps.AXIS, num_replicas=N
  )
  state = tx.init(params)
  specs = optax_dist.states.state_specs(state, maps.AXIS)
  run = jax.shard_map(
    lambda g, s, p: tx.update(jax.tree.map(lambda x: x[0], g), s, p),
    mesh=maps.mesh(N),
    in_specs=(P(maps.AXIS), specs, P()),
    out_specs=(P(), specs),
    check_vma=check_vma,
  )
  gradients = jax.tree.map(lambda x: jnp.stack([x] * N), params)
  text = jax.jit(run).lower(gradients, state, params).compile().as_text()
  count = lambda op: len(re.findall(rf" {op}\(", text))
  assert count("reduce-scatter") == len(params)
  assert count("all-gather") == len(params)
  assert count("all-reduce") == 0
  placed = optax_dist.states.place(state, maps.mesh(N), specs)
  own = sum(
    x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(placed)
  )
  # At most one element of padding per vector more than a part of the whole.
  whole = sum(x.nbytes for x in jax.tree.leaves(params))
  assert own <= whole / N + 4 * len(params)


@jax.numpy_dtype_promotion("standard")
def test_dtypes_are_kept():
  params = {"w": jnp.ones(6, jnp.bfloat16), "c": jnp.ones(3, jnp.complex64)}
  tx = optax_dist.sharded(optax.adam(0.1), maps.AXIS, num_replicas=N)
  state = tx.init(params)
  run = maps.stepper(
    "shard_map_vma", lambda s, g: tx.update(g, s, params), state, N
  )
  gradients = jax.tree.map(lambda x: jnp.stack([x] * N), params)
  updates, new_state = run(state, gradients)
  chex.assert_trees_all_equal_shapes_and_dtypes(new_state, state)
  assert jax.tree.map(lambda x: x.dtype, updates) == jax.tree.map(
    lambda x: x.dtype, gradients
  )


def _starting(start):
  def init_fn(params):
    return jax.tree.map(start, params)

  return optax.GradientTransformation(init_fn, lambda u, s, p=None: (u, s))


class TestRefused:
  """Transforms that are not elementwise are refused by name."""

  @jax.numpy_dtype_promotion("standard")
  @pytest.mark.parametrize(
    ("inner", "name"),
    [
      (optax.clip_by_global_norm(1.0), "clip_by_global_norm mixes"),
      (optax.clip_by_block_rms(1.0), "clip_by_block_rms"),
      (optax.adaptive_grad_clip(1.0), "adaptive_grad_clip"),
      (optax.scale_by_trust_ratio(), "scale_by_trust_ratio"),
      (optax.centralize(), "centralize"),
      (
        optax.scale_by_factored_rms(min_dim_size_to_factor=2),
        "FactoredState.*has shape",
      ),
      (optax.contrib.muon(1.0), "MuonState .* differs in structure"),
      (optax.add_noise(0.1, 0.5, jax.random.key(0)), "add_noise"),
      (optax.apply_if_finite(optax.sgd(1.0), 3), "apply_if_finite mixes"),
      (optimizers.normalized_sgd(0.1), "normalized_sgd mixes"),
      (
        optax.masked(
          optax.scale(2.0),
          lambda p: jax.tree.map(lambda x: x.ndim > 1, p),
        ),
        "",
      ),
      (optax.add_decayed_weights(0.1, _WEIGHTS_ONLY | {"w": False}), None),
    ],
  )
  def test_unsupported_transform_is_refused_by_name(self, inner, name):
    tx = optax_dist.sharded(optax.chain(inner), maps.AXIS, num_replicas=N)
    if name is None:
      tx.init(PARAMS)
      return
    with pytest.raises(ValueError, match=f"can't be sharded: .*{name}") as info:
      tx.init(PARAMS)
    assert "optax_dist.clip_by_global_norm(max_norm" in str(info.value)

  @pytest.mark.parametrize(
    "start",
    [
      lambda x: x / jnp.sum(jnp.abs(x)),
      lambda x: jnp.full_like(x, 2.0) * jnp.max(x),
    ],
  )
  def test_state_that_starts_from_other_elements_is_refused(self, start):
    """Each replica would start from elements of its own shard."""
    tx = optax_dist.sharded(_starting(start), maps.AXIS, num_replicas=N)
    with pytest.raises(ValueError, match="can't be sharded: _starting mixes"):
      tx.init(PARAMS)

  def test_constant_shaped_like_a_leaf_is_refused(self):
    mask = jnp.arange(12.0).reshape(3, 4)
    inner = optax.stateless(lambda u, _: {**u, "w": u["w"] * mask})
    tx = optax_dist.sharded(inner, maps.AXIS, num_replicas=N)
    with pytest.raises((ValueError, TypeError)):
      _check("vmap", tx, inner)

  def test_summed_gradient_is_refused(self):
    tx = optax_dist.sharded(optax.sgd(0.1), maps.AXIS, num_replicas=N)
    state = tx.init(jnp.ones(3))
    with pytest.raises(ValueError, match="arrived already summed"):
      maps.run(
        "shard_map_vma",
        lambda x: tx.update(jnp.ones(3), state)[0] + x,
        np.ones((N, 3), np.float32),
        size=N,
      )

  @pytest.mark.parametrize("check_vma", [False, True])
  def test_scattered_gradient_is_refused(self, check_vma):
    tx = optax_dist.sharded(optax.sgd(0.1), maps.AXIS, num_replicas=N)
    with pytest.raises(ValueError, match=r"updates\['w'\] is one shard"):
      scattered.update(tx, N, check_vma)

  def test_sparse_gradients_are_refused(self):
    tx = optax_dist.sharded(optax.sgd(0.1), maps.AXIS, num_replicas=1)
    slices = optax_dist.IndexedSlices(jnp.ones((1, 2)), jnp.array([0]), (3, 2))
    state = tx.init(jnp.ones((3, 2)))
    with pytest.raises(TypeError, match="sparse, which has no parts"):
      jax.vmap(lambda g: tx.update(g, state), axis_name=maps.AXIS)(
        jax.tree.map(lambda x: x[None], slices)
      )

  def test_unknown_number_of_replicas_is_refused(self):
    with pytest.raises(ValueError, match="number of replicas is not known"):
      optax_dist.sharded(optax.sgd(0.1), maps.AXIS).init(PARAMS)
