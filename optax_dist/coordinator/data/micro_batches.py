"""The micro-batches of deterministic data, and the sums of their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np

from optax_dist import ledger
from optax_dist.coordinator.aggregation import nodes
from optax_dist.coordinator.protocol.policies import audit
from optax_dist.coordinator.runtime import threads
from optax_dist.coordinator.runtime.processes import Processes
from optax_dist.ledger import Spans, tree


class Slot(NamedTuple):
  """A micro-batch: its samples and its key follow from step and number alone.

  Attributes:
    step: the step that it belongs to, counted from the first sample of the data.
    number: its number in the step, from 0.
    indices: int64 indices of its samples.
    key: the key of its random numbers, for dropout and the like: a scalar key,
      `fold_in(fold_in(key(data.seed), step), number)`.
  """

  step: int
  number: int
  indices: np.ndarray
  key: jax.Array


class Slots:
  """Makes the slots of positions.

  Attributes:
    data: the deterministic data.

  Example:
    >>> data = ledger.Batches(8, 4, micro_batch=2, deterministic=True)
    >>> slot = Slots(data)(((6, 8),))
    >>> slot.step, slot.number, slot.indices.shape
    (1, 1, (2,))
  """

  def __init__(self, data: ledger.Batches):
    self.data = data

    def key(step: int, number: int) -> jax.Array:
      first = jax.random.fold_in(jax.random.key(data.seed), step)
      return jax.random.fold_in(first, number)

    self._key = jax.jit(key)

  def number(self, spans: Spans) -> int:
    """The number of the micro-batch at these positions."""
    ((number, _),) = tree.slots(self.data, spans)
    return number

  def __call__(self, spans: Spans) -> Slot:
    """The micro-batch at these positions."""
    step, number = spans[0][0] // self.data.global_batch, self.number(spans)
    key = self._key(step, number)
    return Slot(step, number, self.data.indices(spans), key)


# A sum that may not be there yet.
Sum = futures.Future[nodes.PartialSums]


class Sums:
  """Encodes the gradients of slots and adds them up, beside the training loop.

  An error in its thread is raised again by `result`.
  """

  def __init__(
    self, slots: Slots, summing: nodes.Summing, processes: Processes
  ):
    """Starts without a thread, which the first gradient starts.

    Args:
      slots: the slots.
      summing: adds their gradients up.
      processes: the processes of this replica.
    """
    self._slots, self._summing, self._processes = slots, summing, processes
    self._thread = futures.ThreadPoolExecutor(1, "optax-dist-sums")
    self._last: futures.Future[Any] = _known(None)

  def encode(self, spans: Spans, leaves: Sequence[Any]) -> Sum:
    """The gradient of the slot at these positions; zeros if it isn't finite.

    Args:
      spans: the positions.
      leaves: arrays: what this process has of the gradient.
    """
    # One gradient at a time, so that gradients do not fill the memory.
    futures.wait([self._last])
    # Processes of a replica wait for each other where their programs are at the
    # same place.
    if self._processes.count > 1:
      return _known(self._encoded(spans, leaves))
    encoded = threads.in_this_precision(self._encoded)
    self._last = self._thread.submit(encoded, spans, leaves)
    return self._last

  def _encoded(self, spans: Spans, leaves: Sequence[Any]) -> nodes.PartialSums:
    slot = self._slots.number(spans)
    sums = self._summing.encode(slot, leaves)
    # Each process checks its part; the gradient is finite if all parts are.
    verdicts = self._processes.gather("" if sums is None else "finite")
    if sums is None or "" in verdicts:
      digest = audit.NOT_FINITE
      sums = self._summing.zeros(slot)
    elif self._slots.data.audited(spans):
      digest = sums.digest()
    else:
      return sums
    return sums._replace(work=audit.pack(spans[0][0], digest))

  def add(self, total: Sum, more: Sum) -> Sum:
    """The sum of both; `more` is of one slot."""
    add = lambda: self._summing.add(total.result(), more.result())
    self._last = self._thread.submit(add)
    return self._last

  def close(self) -> None:
    """Cancels work that has not begun, and waits for the thread."""
    self._thread.shutdown(cancel_futures=True)


def _known(result: Any) -> futures.Future[Any]:
  future: futures.Future[Any] = futures.Future()
  future.set_result(result)
  return future
