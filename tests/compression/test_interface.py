"""Tests of what every compression method promises."""

import jax
import jax.extend
import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist import compression

N = 4
_METHODS = {
  "top_k": compression.top_k(0.2, chunk=16),
  "top_k 4 bits": compression.top_k(0.2, chunk=16, bits=4, error_feedback=None),
  "quantize 8": compression.quantize(8, block=7),
  "quantize 1": compression.quantize(1, error_feedback=None),
  "quantize 2 stochastic": compression.quantize(2, stochastic=True, seed=3),
  "sign": compression.sign(),
  "sign with feedback": compression.sign(error_feedback=0.5),
  "power_sgd": compression.power_sgd(2),
  "power_sgd without feedback": compression.power_sgd(1, error_feedback=None),
}
every_method = pytest.mark.parametrize("name", _METHODS)


def _gradients(seed=0):
  rng = np.random.default_rng(seed)
  normal = lambda *shape: rng.normal(size=shape).astype(np.float32)
  return {"b": normal(5), "empty": normal(0), "s": normal(), "w": normal(9, 8)}


def _stacked(gradients, size):
  return jax.tree.map(lambda x: np.stack([x] * size), gradients)


def _collectives(jaxpr):
  """The arrays that replicas send, wherever they do."""
  for equation in jaxpr.eqns:
    if equation.primitive.name.startswith(("all_gather", "psum")):
      yield from (x.aval for x in equation.invars)
    for sub in jax.extend.core.jaxprs_in_params(equation.params):
      yield from _collectives(sub)


@every_method
def test_method_sends_as_many_bytes_as_reported(name):
  method, gradients = _METHODS[name], _gradients()
  state = method.init(gradients)
  step = lambda gradient: method.reduce(gradient, state, (maps.AXIS,))
  run = maps.mapped("shard_map", step, [_stacked(gradients, N)], N)
  program = jax.make_jaxpr(run)(_stacked(gradients, N)).jaxpr
  sent = sum(x.size * x.dtype.itemsize for x in _collectives(program))
  assert sent == method.sent(gradients)
  # As for arrays that there are only the shapes of.
  assert sent == method.sent(jax.eval_shape(lambda: gradients))


def test_bits_per_number_are_as_documented():
  like = jax.ShapeDtypeStruct((2**20,), jnp.float32)
  bits = lambda method: 8 * method.sent(like) / like.size
  for n in (8, 4, 2, 1):
    assert bits(compression.quantize(n)) == n + 32 / 256
  assert f"{bits(compression.sign()):.1f}" == "1.6"
  sparse = bits(compression.top_k(0.03, bits=2))
  assert (f"{sparse:.2f}", int(32 / sparse)) == ("0.28", 113)


@every_method
def test_the_state_keeps_its_types(name):
  """Steps may be repeated in a loop of the compiler."""
  method = _METHODS[name]
  gradients = _gradients()
  state = method.init(gradients)
  assert (state.residual is None) == (method.error_feedback is None)
  new = jax.eval_shape(
    jax.vmap(
      lambda g, s: method.reduce(g, s, (maps.AXIS,))[1], axis_name=maps.AXIS
    ),
    _stacked(gradients, N),
    _stacked(state, N),
  )
  kind = lambda x: (x.shape, x.dtype, getattr(x, "weak_type", False))
  old = jax.eval_shape(lambda: _stacked(state, N))
  assert jax.tree.map(kind, new) == jax.tree.map(kind, old)
