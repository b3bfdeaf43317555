"""Gradients of slots are encoded and added up beside the training loop."""

import threading

import jax.numpy as jnp
import numpy as np
import pytest

from optax_dist import ledger
from optax_dist.coordinator.aggregation import layout, nodes
from optax_dist.coordinator.data import micro_batches
from optax_dist.coordinator.runtime.processes import Processes

DATA = ledger.Batches(16, 8, micro_batch=2, deterministic=True, audit=1.0)
PLACE = layout.layout([np.zeros(5, np.float32)])


class Memory:
  """Memory for gradients, which is there once `ready` is set."""

  def __init__(self):
    self.ready = threading.Event()
    self.ready.set()

  def __call__(self):
    assert self.ready.wait(120.0)
    return memoryview(bytearray(PLACE.nbytes))


@pytest.fixture
def memory():
  return Memory()


@pytest.fixture
def sums(memory):
  slots = micro_batches.Slots(DATA)
  summing = nodes.Summing(PLACE, DATA.slots, memory)
  result = micro_batches.Sums(slots, summing, Processes())
  yield result
  memory.ready.set()
  result.close()


def span(slot):
  """The positions of a slot of step 1."""
  return ((8 + 2 * slot, 10 + 2 * slot),)


def numbers(total):
  (array,) = total.result().arrays
  return array.view(np.float32)[:5].tolist()


def test_jax_gradients_are_encoded_in_the_background(sums, memory):
  memory.ready.clear()
  one = sums.encode(span(0), [jnp.ones(5)])
  assert not one.done()
  memory.ready.set()
  total = sums.add(one, sums.encode(span(1), [jnp.full(5, 2.0)]))
  assert numbers(total) == [3.0] * 5
  assert total.result().spans == ((0, 2),)


def test_a_numpy_array_may_change_after_the_call(sums):
  array = np.ones(5, np.float32)
  one = sums.encode(span(0), [array])
  assert one.done()
  array[:] = 7.0
  assert numbers(one) == [1.0] * 5


def test_encoding_error_is_raised_when_the_sum_is_read(sums):
  gradient = jnp.ones(5)
  gradient.delete()
  total = sums.add(
    sums.encode(span(0), [jnp.ones(5)]), sums.encode(span(1), [gradient])
  )
  with pytest.raises(RuntimeError, match="deleted"):
    total.result()
