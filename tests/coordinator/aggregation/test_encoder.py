"""Gradients as bytes, and what is lost fed back."""

import numpy as np
import pytest

from optax_dist.coordinator.aggregation import encoder


def numbers(seed, size=5000):
  return np.random.default_rng(seed).normal(size=size).astype(np.float32)


def test_the_average_is_numpy_s_in_replica_order():
  made = encoder.Encoder([numbers(0)], "float32")
  raw = np.zeros(made.place.nbytes, np.uint8)
  gradients = []
  for seed in range(3):
    assert made.write([numbers(seed)], raw)
    gradients.append(raw.tobytes())
  (got,) = made.read(made.average(gradients, [1.0, 0.5, 1.0], 4))
  half = numbers(1) * np.float32(0.5)
  want = ((numbers(0) + half) + numbers(2)) / np.float32(4)
  np.testing.assert_array_equal(got, want)


def test_only_what_was_applied_is_fed_back():
  made = encoder.Encoder([numbers(0)], "int8")
  first, second, third = (
    np.zeros(made.place.nbytes, np.uint8) for _ in range(3)
  )
  made.write([numbers(0)], first)
  made.settle(applied=False)
  made.write([numbers(0)], second)
  np.testing.assert_array_equal(first, second)
  made.settle(applied=True)
  made.write([numbers(0)], third)
  assert (second != third).any()


@pytest.mark.parametrize("wire", ["float32", "bfloat16", "int8"])
def test_bytes_of_another_model_are_refused(wire):
  made = encoder.Encoder([numbers(0)], wire)
  with pytest.raises(ValueError, match="gradient of this model has"):
    made.average([b"1234"], [1.0], 1)
  with pytest.raises(ValueError, match=r"mean of this model has .* got 4"):
    made.read(b"1234")
