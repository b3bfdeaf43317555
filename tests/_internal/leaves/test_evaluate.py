"""Tests of evaluating a traced program equation by equation."""

import traceback

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import Literal

from optax_dist._internal.leaves.evaluate import evaluate


def _run(closed, *args):
  """Runs a traced program with :func:`evaluate`."""
  program = closed.jaxpr
  values = dict(
    zip(
      [*program.constvars, *program.invars],
      [*closed.consts, *args],
      strict=True,
    )
  )
  read = lambda x: x.val if isinstance(x, Literal) else values[x]
  for equation in program.eqns:
    results = evaluate(equation, [read(x) for x in equation.invars])
    if not equation.primitive.multiple_results:
      results = [results]
    values |= zip(equation.outvars, results, strict=True)
  return [read(x) for x in program.outvars]


@jax.custom_jvp
def _cubed(x):
  return x**3


_cubed.defjvps(lambda tangent, out, x: 100.0 * tangent)

_PROGRAMS = {
  "several results": lambda x: jax.lax.top_k(x, 2)[1],
  "nested": lambda x: jax.jit(jnp.sort)(x) + x[::-1],
  "loop": lambda x: jax.lax.fori_loop(0, 3, lambda i, y: y * x + i, x),
  "conditional": lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
  "a rule of its own": lambda x: _cubed(x),
  "a constant": lambda x: x + np.arange(3, dtype=np.float32),
}


@pytest.mark.parametrize("name", _PROGRAMS)
def test_the_results_are_those_of_the_program(name):
  fun, x = _PROGRAMS[name], jnp.array([0.5, -2.0, 1.5])
  (got,) = _run(jax.make_jaxpr(fun)(x), x)
  np.testing.assert_allclose(got, fun(x), rtol=1e-6)


def test_a_derivative_is_that_of_its_own_rule():
  x = jnp.array([0.5, -2.0])
  program = jax.make_jaxpr(_cubed)(x)
  (slope,) = jax.jvp(lambda x: _run(program, x)[0], (x,), (jnp.ones(2),))[1:]
  np.testing.assert_array_equal(slope, [100.0, 100.0])


def test_equations_keep_the_names_of_their_scopes_within_that_of_the_caller():
  def named(x):
    with jax.named_scope("inner"):
      return jnp.sin(x)

  program = jax.make_jaxpr(named)(1.0)

  def outer(x):
    with jax.named_scope("outer"):
      return _run(program, x)

  (equation,) = jax.make_jaxpr(outer)(1.0).eqns
  assert str(equation.source_info.name_stack) == "outer/inner"


def test_errors_name_the_line_that_the_equation_comes_from():
  @jax.custom_jvp
  def no_rule(x):
    return 2.0 * x

  @no_rule.defjvp
  def _(primals, tangents):
    raise RuntimeError("no derivative")

  def here(x):
    return no_rule(x)

  program = jax.make_jaxpr(here)(1.0)
  with pytest.raises(RuntimeError, match="no derivative") as caught:
    jax.grad(lambda x: _run(program, x)[0])(1.0)
  frames = traceback.format_exception(caught.value)
  assert "in here" in "".join(frames)


def test_equations_keep_the_settings_that_they_were_traced_with():
  """Random bits differ by the layout that was chosen around the program."""
  draw = lambda key: jax.random.bits(key, (5,), jnp.uint16)
  key = jax.random.key(0)
  with jax.threefry_partitionable(False):
    program = jax.make_jaxpr(draw)(key)
    want = draw(key)
  assert not np.array_equal(draw(key), want)
  np.testing.assert_array_equal(_run(program, key)[0], want)
