"""Tests of scalars that the compiler for CPUs keeps in memory."""

import jax
import jax.numpy as jnp
import maps
import numpy as np
import pytest

from optax_dist._internal import axes
from optax_dist._internal.leaves import materialize

N = 4


@maps.every_map
def test_the_values_are_the_same(map_name):
  def fn(x):
    kept = materialize.materialize({"max": jnp.max(x), "any": jnp.any(x > 3)})
    places = jnp.stack(materialize.integers([0, 7, 2**31 - 1]))
    return kept, places

  x = np.arange(2 * N, dtype=np.float32).reshape(N, 2)
  kept, places = maps.run(map_name, fn, x, size=N)
  np.testing.assert_array_equal(kept["max"], x.max(1))
  np.testing.assert_array_equal(kept["any"], x.max(1) > 3)
  np.testing.assert_array_equal(places, [[0, 7, 2**31 - 1]] * N)


@pytest.mark.parametrize("differentiate", [jax.grad, jax.jacfwd])
def test_a_derivative_passes(differentiate):
  fn = lambda x: jnp.square(materialize.materialize(x))
  assert differentiate(fn)(3.0) == 6.0


def test_other_platforms_need_none(monkeypatch):
  monkeypatch.setattr(axes, "platform", lambda: "tpu")
  x = jnp.asarray(1.0)
  assert materialize.materialize(x) is x
