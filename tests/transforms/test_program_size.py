"""Tests that programs, and so their compilation, grow with the leaves and no more.

``benchmarks/compile_time.py`` measures the time.
"""

import re

import jax
import jax.numpy as jnp
import maps
import optax
import pytest
from jax.sharding import PartitionSpec as P

import optax_dist

N = 4
_INNER = optax.sgd(0.1, momentum=0.9)
_OUTER = optax.sgd(0.7, momentum=0.9, nesterov=True)


def _sync(inner=_INNER, **kwargs):
  return optax_dist.sync_replicas(
    inner, maps.AXIS, total_num_replicas=N, **kwargs
  )


_REPLICAS = {"communication_period": 10, "num_replicas": N}
_SHARED = {
  "cross_shard": optax.chain(optax_dist.cross_shard(maps.AXIS), _INNER),
  "all_arrive": _sync(replicas_to_aggregate=N, all_arrive=True),
  "sync": _sync(replicas_to_aggregate=N),
  "accumulating": _sync(replicas_to_aggregate=4 * N),
}
_OWN = {
  "elastic": optax_dist.elastic_average(
    _INNER, maps.AXIS, learning_rate=0.1, **_REPLICAS
  ),
  "local": optax_dist.local_updates(_INNER, _OUTER, maps.AXIS, **_REPLICAS),
  "streaming": optax_dist.streaming_updates(
    _INNER, _OUTER, maps.AXIS, fragments=2, **_REPLICAS
  ),
}


def _lowered(tx, leaves, own):
  """Returns an update of so many leaves of one small shape."""
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  params = [array(8)] * leaves
  stacked = [array(N, 8)] * leaves
  state = jax.eval_shape(tx.init, params)
  specs = optax_dist.state_specs(state, maps.AXIS)

  def step(params, state, gradients):
    row = lambda tree: jax.tree.map(lambda x: x[0], tree)
    params = row(params) if own else params
    updates, state = tx.update(row(gradients), state, params)
    params = optax.apply_updates(params, updates)
    return jax.tree.map(lambda x: x[None], params) if own else params, state

  spec = P(maps.AXIS) if own else P()
  run = jax.shard_map(
    step,
    mesh=maps.mesh(N),
    in_specs=(spec, specs, P(maps.AXIS)),
    out_specs=(spec, specs),
    check_vma=False,
  )
  args = stacked if own else params, state, stacked
  return jax.jit(run).lower(*args)


def _compiled(name, leaves):
  """Returns its text, for a transform by name."""
  own = name in _OWN
  lowered = _lowered({**_SHARED, **_OWN}[name], leaves, own)
  return lowered.compile().as_text()


def _kernels(text):
  """Returns the different computations, whatever their values are called."""
  bodies = re.findall(r"^%[\w.-]+ \(.*?\{$\n(.*?)^\}", text, re.M | re.S)
  different = set()
  for body in bodies:
    body = re.sub(
      r", (metadata|backend_config|frontend_attributes)=.*", "", body
    )
    names: dict[str, str] = {}
    different.add(
      re.sub(
        r"%[\w.-]+",
        lambda m, names=names: names.setdefault(m[0], f"%{len(names)}"),
        body,
      )
    )
  return different


def _operations(text):
  return len(re.findall(r"^ .* = ", text, re.MULTILINE))


@pytest.mark.parametrize("name", [*_SHARED, *_OWN])
def test_twice_the_leaves_are_twice_the_program(name):
  """XLA for CPUs compiles equal kernels once, so different ones cost."""
  few, many = (_compiled(name, leaves) for leaves in (24, 48))
  assert _operations(many) <= 2.05 * _operations(few)
  assert len(_kernels(many)) <= len(_kernels(few)) + 2


_ADAM = optax.adam(0.1)
_WITH_ADAM = {
  "sync": _sync(_ADAM, replicas_to_aggregate=N),
  "accumulating": _sync(_ADAM, replicas_to_aggregate=4 * N),
  "elastic": optax_dist.elastic_average(
    _ADAM, maps.AXIS, learning_rate=0.1, **_REPLICAS
  ),
}


@jax.numpy_dtype_promotion("standard")  # Which Adam needs.
@pytest.mark.parametrize("name", _WITH_ADAM)
def test_the_inner_optimizer_computes_once_for_all_small_leaves(name):
  text = _lowered(_WITH_ADAM[name], 9, name in _OWN).as_text()
  assert text.count("stablehlo.sqrt") == 1


def test_only_sums_pass_the_conditional_of_accumulating_small_leaves():
  """What passes a branch is copied, and is more to compile."""
  text = _lowered(_SHARED["accumulating"], 9, False).as_text()
  returned = re.findall(r"^ *\}\) : \(tensor<i32>\) -> (.*)$", text, re.M)
  sums = f"tensor<{9 * 8 + 1}xf32>"
  assert f"({sums}, tensor<i32>)" in returned
  assert not any("tensor<8xf32>" in types for types in returned)


@pytest.mark.parametrize(
  ("name", "sizes"), [("local", [9 * 8]), ("streaming", [5 * 8, 4 * 8])]
)
def test_only_what_was_sent_passes_a_conditional_where_all_is_small(
  name, sizes
):
  """What passes a loop or a branch is copied, and is more to compile."""
  text = _lowered(_OWN[name], 9, True).as_text()
  branches = re.findall(r"^ *\}\) : \(tensor<i32>\) -> (.*)$", text, re.M)
  loops = re.findall(r"stablehlo\.while\(.*\) : (.*)$", text, re.M)
  assert loops
  for size in sizes:
    # Beside them, how many replicas are finite; and whether this one is.
    sent = f"(tensor<{size + 1}xf32>, tensor<i1>)"
    assert sent in branches
  # What a branch reads passes it, too.
  inside = re.findall(
    r'"stablehlo\.case"\(.*?\}\) : \(tensor<i32>\)', text, re.S
  )
  assert len(inside) == len(branches)
  for types in inside + branches + loops:
    assert not re.search(r"tensor<(1x)?8xf32>", types)


def test_kernels_are_told_apart_by_their_constants_and_not_by_names():
  text = """
%a (p.1: f32[8]) -> f32[8] {
  %p.1 = f32[8] parameter(0), metadata={op_name="x"}
  ROOT %s.1 = f32[4] slice(%p.1), slice={[0:4]}
}

%b (p.2: f32[8]) -> f32[8] {
  %p.2 = f32[8] parameter(0)
  ROOT %s.2 = f32[4] slice(%p.2), slice={[0:4]}
}

%c (p.3: f32[8]) -> f32[8] {
  %p.3 = f32[8] parameter(0)
  ROOT %s.3 = f32[4] slice(%p.3), slice={[4:8]}
}
"""
  assert len(_kernels(text)) == 2
  assert _operations(text) == 6


def test_no_large_array_goes_through_a_branch_in_an_elastic_exchange():
  """It would be copied there, in each exchange."""
  large = 1 << 14
  array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
  params = [array(large), array(8), array(8)]
  stacked = [array(N, *x.shape) for x in params]
  tx = _OWN["elastic"]
  state = jax.eval_shape(tx.init, params)
  specs = optax_dist.state_specs(state, maps.AXIS)

  def step(params, state, gradients):
    row = lambda tree: jax.tree.map(lambda x: x[0], tree)
    return tx.update(row(gradients), state, row(params))[1]

  run = jax.shard_map(
    step,
    mesh=maps.mesh(N),
    in_specs=(P(maps.AXIS), specs, P(maps.AXIS)),
    out_specs=specs,
    check_vma=False,
  )
  text = jax.jit(run).lower(stacked, state, stacked).as_text()
  returned = re.findall(r"^ *\}\) : \(tensor<i32>\) -> (.*)$", text, re.M)
  assert any("tensor<16xf32>" in types for types in returned)
  assert not any(f"tensor<{large}xf32>" in types for types in returned)
