"""Tests of compression with parameters that are sharded over a model axis."""

import functools

import jax
import numpy as np
import optax
import pytest
from flax import serialization
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from own_params import normal, row, stack, take_step

import optax_dist
from optax_dist import compression

N = 2
M = 2
STEPS = 5
#: By columns, by rows, and whole on each shard.
SPECS = {"w": P(None, "model"), "v": P("model", None), "b": P()}
METHODS = {
  "top_k": compression.top_k(0.2, bits=2, error_feedback=0.9),
  "quantize": compression.quantize(4, block=8),
  "stochastic": compression.quantize(2, stochastic=True, error_feedback=None),
  "sign": compression.sign(error_feedback=0.5),
  "vote": compression.sign(),
  "power_sgd": compression.power_sgd(1),
}
LOCAL = {"communication_period": 2, "num_replicas": N}
OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def _cross_shard(method):
  return optax.chain(
    optax_dist.cross_shard("data", compression=method, num_replicas=N),
    optax.sgd(0.1, momentum=0.5),
  )


def _local_updates(method, model_axes="model"):
  return optax_dist.local_updates(
    optax.sgd(0.1),
    OUTER,
    "data",
    compression=method,
    model_axes=model_axes,
    **LOCAL,
  )


def _streaming(method, model_axes="model", **kwargs):
  return optax_dist.streaming_updates(
    optax.sgd(0.1),
    OUTER,
    "data",
    fragments=2,
    compression=method,
    model_axes=model_axes,
    **LOCAL,
    **kwargs,
  )


MAKE = {
  "cross_shard": lambda method, **_: _cross_shard(method),
  "local_updates": _local_updates,
  "streaming": _streaming,
  "streaming_late": functools.partial(_streaming, delay=1, mix=0.5),
}


def _start():
  return {"w": normal(0, 6, 16), "v": normal(1, 16, 6), "b": normal(2, 6)}


def _gradients(seed):
  start = _start()
  return {
    k: normal(seed + i, N, *x.shape) for i, (k, x) in enumerate(start.items())
  }


def _mesh():
  return jax.make_mesh(
    (N, M),
    ("data", "model"),
    axis_types=(AxisType.Auto,) * 2,
    devices=jax.devices()[: N * M],
  )


def _on_mesh(tx, check_vma, init_inside=True, specs=SPECS):
  """Returns what a training with sharded parameters leaves."""
  mesh, start = _mesh(), _start()
  own_specs = {k: P("data", *spec) for k, spec in specs.items()}
  of_state = optax_dist.states.state_specs(
    jax.eval_shape(tx.init, start), "data", param_specs=specs
  )
  over = functools.partial(jax.shard_map, mesh=mesh, check_vma=check_vma)
  start = optax_dist.states.place(start, mesh, specs)
  if init_inside:
    init = over(tx.init, in_specs=(specs,), out_specs=of_state)
    state = jax.jit(init)(start)
  else:
    state = optax_dist.states.place(tx.init(_start()), mesh, of_state)

  def step(state, params, gradients):
    own = (row(params, 0), row(gradients, 0))
    params, state = take_step(tx, state, *own)
    return jax.tree.map(lambda x: x[None], params), state

  run = jax.jit(
    over(
      step,
      in_specs=(of_state, own_specs, own_specs),
      out_specs=(own_specs, of_state),
    )
  )
  params = optax_dist.states.place(stack(_start(), N), mesh, own_specs)
  for i in range(STEPS):
    gradients = optax_dist.states.place(_gradients(i), mesh, own_specs)
    params, state = run(state, params, gradients)
    # As a checkpoint does it, which has one array of what counts as equal.
    state = optax_dist.states.place(jax.device_get(state), mesh, of_state)
  return jax.device_get((params, state))


def _shard(tree, m, specs=SPECS):
  """Returns the part of a model shard of arrays with a replica axis."""

  def part(x, spec):
    for axis, name in enumerate(spec, x.ndim - len(spec)):
      x = np.split(x, M, axis)[m] if name else x
    return x

  return {k: part(x, specs[k]) for k, x in tree.items()}


@functools.cache
def _alone(transform_name, name):
  """Returns what each shard's training leaves, as a model of its own."""
  tx = MAKE[transform_name](METHODS[name], model_axes=())
  # Shards are of one shape.
  axes = optax_dist.states.state_axes(tx.init(_shard(_start(), 0)))
  run = jax.jit(
    jax.vmap(
      functools.partial(take_step, tx),
      axis_name="data",
      in_axes=(axes, 0, 0),
      out_axes=(0, axes),
    )
  )
  results = []
  for m in range(M):
    start = _shard(_start(), m)
    params, state = stack(start, N), tx.init(start)
    for i in range(STEPS):
      params, state = run(state, params, _shard(_gradients(i), m))
    results.append(jax.device_get((params, state)))
  return results


@pytest.mark.parametrize(
  ("transform_name", "name", "check_vma"),
  [
    ("cross_shard", "quantize", True),
    ("cross_shard", "stochastic", True),
    ("cross_shard", "power_sgd", False),
    ("local_updates", "top_k", False),
    ("local_updates", "vote", True),
    ("streaming", "sign", True),
    ("streaming_late", "power_sgd", True),
    ("streaming_late", "top_k", True),
  ],
)
def test_each_shard_is_compressed_on_its_own(transform_name, name, check_vma):
  params, _ = _on_mesh(MAKE[transform_name](METHODS[name]), check_vma)
  for m, (expected, _) in enumerate(_alone(transform_name, name)):
    for k, x in _shard(params, m).items():
      np.testing.assert_allclose(x, expected[k], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform_name", ["local_updates", "streaming_late"])
def test_error_feedback_is_sharded_like_the_parameters(transform_name):
  tx = MAKE[transform_name](METHODS["power_sgd"])
  # Also a state made outside of the map, where this method doesn't need shards.
  state = jax.eval_shape(tx.init, _start())
  specs = optax_dist.states.state_specs(state, "data", param_specs=SPECS)
  residuals, shared = specs.replica.value.residual, specs.shared
  if transform_name == "local_updates":
    residuals, shared = (residuals,), (shared,)
  parts = {k: P("data", *spec) for k, spec in SPECS.items()}
  result = [k for part in residuals for k in parts if part[k] == parts[k]]
  assert sorted(result) == sorted(parts)
  # Each shard has factors of its own, whichever axis is sharded.
  factors = jax.tree.leaves(shared, is_leaf=lambda x: isinstance(x, P))
  assert factors == [P("model")] * 2


def test_state_may_be_made_outside_of_the_map():
  tx = _local_updates(METHODS["top_k"])
  results = [
    _on_mesh(tx, True, init_inside)[0] for init_inside in (True, False)
  ]
  jax.tree.map(np.testing.assert_array_equal, *results)


def test_factors_of_whole_matrices_are_refused():
  with pytest.raises(
    ValueError, match=r"updates\['v'\] has shape \(8, 6\)"
  ) as info:
    _on_mesh(_cross_shard(METHODS["power_sgd"]), True, init_inside=False)
  assert "`init` inside of the map" in str(info.value)


def test_sharding_does_not_decide_whether_a_leaf_is_factored():
  """Rank 4 saves nothing on 6 rows by 16 columns, nor on 6 by 8."""
  for rank in range(1, 7):
    method = compression.power_sgd(rank)
    whole, part = (
      method.init(jax.eval_shape(lambda x: x, x))
      for x in (_start(), row(stack(_shard(_start(), 0)), 0))
    )
    assert jax.tree.structure(whole) == jax.tree.structure(part)


@pytest.mark.parametrize("transform_name", ["cross_shard", "local_updates"])
def test_compression_works_under_plain_jit(transform_name):
  method, own = METHODS["top_k"], transform_name != "cross_shard"
  tx = optax_dist.under_jit(
    MAKE[transform_name](method),
    "data",
    mesh=_mesh(),
    own_params=own,
    param_specs=SPECS,
  )
  over = {k: P("data", *spec) for k, spec in SPECS.items()}
  start = stack(_start(), N) if own else _start()
  params = optax_dist.states.place(start, _mesh(), over if own else SPECS)
  state = jax.jit(tx.init)(params)
  run = jax.jit(functools.partial(take_step, tx))
  for i in range(STEPS):
    gradients = optax_dist.states.place(_gradients(i), _mesh(), over)
    params, state = run(state, params, gradients)
  params = jax.device_get(params)
  for m, (expected, _) in enumerate(_alone(transform_name, "top_k")):
    for k, x in _shard(params, m).items():
      want = expected[k] if own else expected[k][0]
      np.testing.assert_allclose(x, want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform_name", ["local_updates", "streaming_late"])
def test_the_state_is_saved_restored_and_resized(transform_name):
  tx = MAKE[transform_name](METHODS["power_sgd"])
  params, state = _on_mesh(tx, False)
  restored = serialization.from_bytes(
    tx.init(_start()), serialization.to_bytes(state)
  )
  jax.tree.map(np.testing.assert_array_equal, restored, state)
  result = optax.tree.get(state, "residual")
  jax.tree.map(
    np.testing.assert_array_equal, result, state.replica.value.residual
  )
  params, state = optax_dist.states.resize_from_center(params, state, N + 1)
  residual = state.replica.value.residual
  for x, old in zip(*map(jax.tree.leaves, (residual, result)), strict=True):
    assert x.shape == (N + 1, *old.shape[1:])
