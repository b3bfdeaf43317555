"""Tests of which functions of leaves also work on flat parts of them."""

import jax
import jax.numpy as jnp
import pytest
from jax.scipy import special

from optax_dist._internal.leaves import elementwise

_NAMES = """abs sign sqrt square cbrt exp exp2 expm1 log log1p log2 log10 sin cos
tan arcsin arccos arctan sinh cosh tanh arcsinh arccosh arctanh floor ceil rint
reciprocal isfinite isnan signbit i0""".split()  # noqa: SIM905
_DERIVED = ["arcsin", "arccos", "arctanh", "tanh", "log2", "sqrt", "exp2", "i0"]
_OTHERS = {
  "copysign": lambda x: jnp.copysign(jnp.float32(2), x),
  "frexp": lambda x: jnp.ldexp(*jnp.frexp(x)),
  "i0e": special.i0e,
  "i1e": special.i1e,
  "gammainc": lambda x: special.gammainc(x, x),
  "gammaincc": lambda x: special.gammaincc(x, x),
  "polygamma": lambda x: special.polygamma(1, x),
  "zeta": lambda x: special.zeta(x, jnp.float32(2)),
  "betainc": lambda x: special.betainc(x, x, x),
  "bits": lambda x: jax.lax.population_count(
    jax.lax.bitcast_convert_type(x, jnp.int32)
  ),
}


def _check(fun):
  """Checks a function on a leaf of 12 elements, and on half of them."""
  whole, part = (
    (jax.ShapeDtypeStruct(shape, jnp.float32),) for shape in ((3, 4), (6,))
  )
  elementwise.check(fun, whole, part, [True], [True])


@pytest.mark.parametrize("name", _NAMES)
def test_numpy_functions_are_elementwise(name):
  """JAX versions differ in the primitives that these are made of."""
  _check(getattr(jnp, name))


@pytest.mark.parametrize("name", _DERIVED)
def test_derivatives_of_numpy_functions_are_elementwise(name):
  fun = getattr(jnp, name)
  _check(lambda x: jax.vjp(fun, x)[1](x)[0])


@pytest.mark.parametrize("name", _OTHERS)
def test_other_functions_are_elementwise(name):
  _check(_OTHERS[name])


def test_sum_is_not_elementwise():
  with pytest.raises(elementwise.NotElementwise, match=r"mixes .*reduce_sum"):
    _check(lambda x: x / jnp.sum(x))


def test_bytes_of_a_number_are_not_elementwise():
  with pytest.raises(elementwise.NotElementwise, match="bitcast_convert_type"):
    _check(lambda x: jax.lax.bitcast_convert_type(x, jnp.uint8)[..., 0])


@pytest.mark.parametrize(
  "fun",
  [
    lambda x: x / x.size,
    lambda x: x if x.ndim > 1 else -x,
    lambda x: jnp.where(x.size > 8, x, jnp.float32(jnp.nan)),
  ],
)
def test_use_of_the_shape_is_not_elementwise(fun):
  with pytest.raises(elementwise.NotElementwise, match="by its shape"):
    _check(fun)


def test_use_of_the_position_is_not_elementwise():
  with pytest.raises(elementwise.NotElementwise, match="mixes"):
    _check(lambda x: x * jnp.arange(x.size, dtype=x.dtype).reshape(x.shape))


def test_comparing_leaves_by_size_is_not_elementwise():
  def swap_by_size(a, b):
    return sorted([2 * a, 2 * b], key=lambda x: x.size)

  shapes = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (4, 6)]
  parts = [jax.ShapeDtypeStruct((n,), jnp.float32) for n in (3, 2)]
  with pytest.raises(elementwise.NotElementwise, match="by its shape"):
    elementwise.check(swap_by_size, shapes, parts, [True] * 2, [True] * 2)


@pytest.mark.parametrize(
  "fun",
  [
    lambda x: jnp.where(x > 0, x, jnp.nan) * 2.0,
    lambda x: jax.lax.cond(jnp.float32(1) > 0, lambda: x + 1, lambda: 0 * x),
    lambda x: jax.jit(lambda x: jnp.full_like(x, 2.0) * x)(x),
  ],
)
def test_scalar_leaf_may_be_a_shard_of_one_element(fun):
  whole, part = (
    (jax.ShapeDtypeStruct(shape, jnp.float32),) for shape in ((), (1,))
  )
  elementwise.check(fun, whole, part, [True], [True])
