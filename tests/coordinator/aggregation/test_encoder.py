"""Gradients as bytes, in a buffer or where they were computed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist.coordinator.aggregation import encoder


def numbers(seed, size=5000):
  return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def placed(leaves, wire="float32"):
  """The parts of a gradient that stays in place, and its buffer."""
  made = encoder.Encoder(leaves, wire)
  out = np.full(made.place.nbytes, 255, np.uint8)
  return made, made.write(leaves, out, in_place=True), out


def test_a_gradient_in_place_has_the_bytes_of_one_that_is_copied(monkeypatch):
  monkeypatch.setattr(encoder, "_IN_PLACE", 200)
  leaves = [
    jnp.asarray(numbers(0, 77)).reshape(7, 11),
    jnp.asarray(numbers(1, 3)),
    jnp.zeros((0, 4)),
    jnp.asarray(numbers(2, 130)).astype(jnp.bfloat16),
    jnp.float16(4),
    jnp.arange(64, dtype=jnp.int32),
    jnp.asarray(numbers(3, 128)),
  ]
  made, parts, out = placed(leaves)
  for each in parts[::2]:  # What does not stay is in the buffer.
    assert np.shares_memory(np.frombuffer(each, np.uint8), out) or not each
  raw = np.frombuffer(b"".join(parts), np.uint8)
  assert raw.size == made.place.nbytes
  for got, leaf in zip(made.read(raw), leaves, strict=True):
    np.testing.assert_array_equal(got, leaf)
  where = {np.frombuffer(part, np.uint8).ctypes.data for part in parts if part}
  stays = [leaf.unsafe_buffer_pointer() in where for leaf in leaves]
  assert stays == [True, False, False, True, False, True, True]


def test_a_donated_array_that_is_still_sent_keeps_its_numbers():
  leaf = jax.jit(lambda x: x + 1)(jnp.zeros(20_000))
  _, parts, _ = placed([leaf])
  jax.jit(lambda x: x + 1, donate_argnums=0)(leaf).block_until_ready()
  del leaf
  jax.jit(lambda x: x + 5)(jnp.zeros(20_000)).block_until_ready()
  np.testing.assert_array_equal(np.frombuffer(parts[1], np.float32), 1.0)


@pytest.mark.parametrize(
  ("kind", "wire"),
  [
    # NumPy's arrays may be written to after an interrupted step.
    (np.asarray, "float32"),
    (jnp.asarray, "bfloat16"),
    (jnp.asarray, "int8"),
  ],
)
def test_what_may_change_or_is_shortened_is_copied(kind, wire):
  _, parts, out = placed([kind(numbers(0, 20_000))], wire)
  (part,) = parts
  assert np.shares_memory(np.frombuffer(part, np.uint8), out)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", [0, 1])
def test_numbers_in_place_are_checked(bad, where):
  leaves = [jnp.zeros(20_000), jnp.zeros(5)]
  leaves[where] = leaves[where].at[-1].set(bad)
  assert placed(leaves)[1] is None
  # The sum of these is not finite, and each of them is.
  assert placed([jnp.full(20_000, 3e38)])[1] is not None


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_bytes_of_another_model_are_refused(wire):
  made = encoder.Encoder([numbers(0)], wire)
  with pytest.raises(ValueError, match=r"mean of this model has .* got 4"):
    made.read(b"1234")
