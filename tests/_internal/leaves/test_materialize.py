"""Tests of scalars that the compiler for CPUs keeps in memory."""

import re

import jax
import jax.numpy as jnp

from optax_dist._internal import axes
from optax_dist._internal.leaves import materialize

N = 4


def test_a_materialized_scalar_is_computed_once_and_fills_no_array():
  def fn(x, starts):
    kept = materialize.materialize(x + 1)
    return [jax.lax.dynamic_slice(kept, (i,), (2,)) for i in starts]

  text = jax.jit(fn).lower(jnp.ones(64), [0, 1, 2]).compile().as_text()
  made = re.findall(r"= f32\[64\]\S* (add|broadcast)\(", text)
  # Within the kernel that adds, one is spread out.
  assert made.count("add") == 1
  assert "wrapped_broadcast" not in text


def test_other_platforms_do_not_materialize(monkeypatch):
  monkeypatch.setattr(axes, "platform", lambda: "tpu")
  x = jnp.asarray(1.0)
  assert materialize.materialize(x) is x
