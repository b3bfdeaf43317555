"""Tests of what compressed aggregation moves between 256 TPU chips."""

import re

import aot
import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import optax_dist
from optax_dist import compression

_CHIPS = 256
_TOPOLOGY = "v5e:16x16"
# Large enough that the compiler does not think of latency alone.
_PARAMS = {"w": (1024, 1024), "v": (1024, 128), "b": (1024,)}
# It takes the longer to compile bits, the more there are.
_FEWER = {"w": (1024, 320), "b": (1024,)}
_SMALL = 64 << 10
_BYTES_OF = {"u8": 1, "s8": 1, "u32": 4, "f32": 4, "s32": 4}
METHODS = {
  "top_k": compression.top_k(0.03, bits=2),
  "quantize": compression.quantize(4),
  "sign": compression.sign(),
  "power_sgd": compression.power_sgd(4),
}


def _received(text):
  """Returns the bytes of what collectives return, by their kind."""
  result = {}
  pattern = r"= ([^=\n]*?) (all-gather|all-reduce)(?:-start)?\("
  for type_, kind in re.findall(pattern, text):
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", type_)
    if f"{kind}-start(" in text:
      shapes = shapes[len(shapes) // 2 :]  # Operands come before results.
    for dtype, dims in shapes:
      count = 1
      for n in filter(None, dims.split(",")):
        count *= int(n)
      result[kind] = result.get(kind, 0) + count * _BYTES_OF[dtype]
  return result


@pytest.mark.parametrize("name", METHODS)
def test_only_packed_bytes_are_communicated(name):
  method = METHODS[name]
  shapes = _FEWER if name in ("sign", "quantize") else _PARAMS
  tx = optax_dist.cross_shard(aot.AXIS, compression=method, num_replicas=_CHIPS)
  params = {
    k: jax.ShapeDtypeStruct(shape, jnp.float32) for k, shape in shapes.items()
  }
  gradients = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(
      (_CHIPS * x.shape[0], *x.shape[1:]), x.dtype
    ),
    params,
  )
  state = jax.eval_shape(tx.init, params)
  specs = optax_dist.states.state_specs(state, aot.AXIS)
  leaves, treedef = jax.tree.flatten(state)
  flat = treedef.flatten_up_to(specs)

  def step(gradients, *leaves):
    mean, new = tx.update(gradients, treedef.unflatten(leaves))
    return mean, *jax.tree.leaves(new)

  compiled = aot.compile_for(
    _TOPOLOGY,
    step,
    (gradients, *leaves),
    (P(aot.AXIS), *flat),
    (P(), *flat),
    check_vma=True,
  )
  text = compiled.as_text()
  sent = method.sent(params)
  received = _received(text)
  if name == "power_sgd":
    # Both products, each reduced once; the first has what is sent whole.
    assert aot.count_collectives(text) == {"all-reduce": 2}
    assert received == {"all-reduce": sent}
  else:
    # The compiler gathers what is small by a sum among zeros, for the latency.
    kind = "all-reduce" if sent < _SMALL else "all-gather"
    assert aot.count_collectives(text) == {kind: 1}
    # Up to the padding to whole tiles.
    assert 0 <= received[kind] - _CHIPS * sent < 512 * _CHIPS
