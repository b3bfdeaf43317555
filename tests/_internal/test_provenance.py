"""Tests of where values come from; test_cross_shard_reduced_before has more."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from optax_dist._internal import provenance

N = 4
AXIS = maps.AXIS


def _in_map(fn, jit=True):
  """Returns what ``fn`` says of a parameter and a replica's batch."""
  said = []

  def body(w, x):
    said.append(fn(w, x[0]))
    return w

  run = jax.shard_map(
    body, mesh=maps.mesh(N), in_specs=(P(), P(AXIS)), out_specs=P()
  )
  (jax.jit(run) if jit else run)(jnp.ones(2), jnp.ones((N, 2)))
  return said[-1]


def _loss(w, x):
  return jnp.sum(jnp.square(w * x))


_SUM = lambda x: jax.lax.psum(x, AXIS)


@pytest.mark.parametrize(
  ("make", "origin"),
  [
    (jax.grad(_loss), "gradient"),
    (jax.grad(jax.jit(_loss)), "gradient"),
    (jax.jit(jax.grad(_loss)), "gradient"),
    (jax.grad(jax.checkpoint(_loss)), "gradient"),
    (lambda w, x: jax.vjp(lambda w: _loss(w, x), w)[1](x[0])[0], "gradient"),
    (lambda w, x: 2 * jax.grad(_loss)(w, x) + _SUM(x), "gradient"),
    (lambda w, x: jax.lax.pmean(jax.grad(_loss)(w, x), AXIS), "gradient"),
    (lambda w, x: _SUM(x), "caller"),
    (lambda w, x: jax.lax.pmean(x, AXIS) + 0.1 * w, "caller"),
    (lambda w, x: jax.jit(_SUM)(x), "caller"),
    (lambda w, x: jnp.tanh(jax.lax.all_gather(
      x, AXIS, to="invarying")[0]), "caller"),
    (lambda w, x: jax.lax.cond(w[0] > 0, lambda: _SUM(x), lambda: w), "caller"),
    (lambda w, x: w, None),
    (lambda w, x: w + jnp.ones(2), None),
    (lambda w, x: np.ones(2), None),
  ],
)  # fmt: skip
def test_the_origin_of_a_reduction_is_found(make, origin):
  said = _in_map(lambda w, x: (provenance.origin_of(make(w, x), AXIS),))
  assert said == (origin,)


def test_scope_of_another_axis_is_ignored():
  def scoped(name):
    def fn(w, x):
      with provenance.reduced_over((name,)):
        scaled = 2 * w
      return provenance.origin_of(scaled + 1, AXIS)

    return fn

  assert _in_map(scoped(AXIS)) == "caller"
  assert _in_map(scoped(AXIS + "2")) is None


@pytest.mark.parametrize("order", [1, -1])
def test_two_calls_of_one_program_are_distinguished(order):
  double = jax.jit(lambda x: 2 * x)

  def fn(w, x):
    mean, gradient = jax.lax.pmean(x, AXIS), jax.grad(_loss)(w, x)
    a, b = [mean, gradient][::order]
    return provenance.origin_of(double(a) + double(b), AXIS)

  assert _in_map(fn) == "gradient"


@pytest.mark.parametrize("question", ["origin_of", "is_scattered"])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_an_equation_that_many_values_depend_on_is_read_once(
  wrap, question, monkeypatch
):
  """Otherwise tracing takes a time that grows with the square of the leaves."""
  read, operands = [], provenance._Value.operands

  def counted(self):
    read.append(None)
    return operands(self)

  monkeypatch.setattr(provenance._Value, "operands", counted)

  @wrap
  def clipped(xs):
    means = [jax.lax.pmean(x, AXIS) for x in xs]
    total = sum(means)  # A scalar, as the values are.
    return [x / total for x in means]

  def number(leaves):
    def fn(w, x):
      known = provenance.Known()
      values = clipped([(i + 1) * x[0] for i in range(leaves)])
      read.clear()
      for value in values:
        getattr(provenance, question)(value, AXIS, known)
      return len(read)

    return _in_map(fn)

  assert 0 < number(40) <= 2.2 * number(20)
