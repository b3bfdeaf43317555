"""Tests that programs, and so their compilation, grow with the leaves and no more.

``benchmarks/whole_step.py`` measures the time.
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
  specs = optax_dist.states.state_specs(state, maps.AXIS)

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
def test_program_size_is_linear_in_the_leaves(name):
  """XLA for CPUs compiles equal kernels once, so different ones cost."""
  few, many = (_compiled(name, leaves) for leaves in (8, 16))
  assert _operations(many) <= 2.05 * _operations(few)
  assert len(_kernels(many)) <= len(_kernels(few)) + 2


def test_kernels_are_distinguished_by_their_constants_and_not_by_names():
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
