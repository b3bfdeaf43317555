"""TensorFlow's FIFO queue of tokens, event for event.

Source: tensorflow/core/kernels/fifo_queue.cc.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable

from tests.tensorflow1.events.outcomes import Completed

DEQUEUE_CANCELLED = "CancelledError: Dequeue operation was cancelled"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenQueue:
  """The bookkeeping of an unbounded `FIFOQueue` of steps.

  Attributes:
    name: name of the queue, for its errors.
    tokens: the queued tokens, in order.
    pending: ids of the pending dequeues, in order.
    closed: whether it was closed; it can't be reopened.

  Example:
    >>> queue, _ = TokenQueue().dequeue("w0")
    >>> queue, out = queue.enqueue_many([7, 7])
    >>> out[0].id, out[0].value, queue.size
    ('w0', 7, 1)
  """

  name: str = "sync_token_q"
  tokens: tuple[int, ...] = ()
  pending: tuple[Hashable, ...] = ()
  closed: bool = False

  @property
  def size(self) -> int:
    """The number of queued tokens."""
    return len(self.tokens)

  def enqueue_many(
    self, tokens: Iterable[int]
  ) -> tuple[TokenQueue, tuple[Completed, ...]]:
    """Enqueues tokens, which first serve the pending dequeues."""
    inputs = tuple(tokens)
    if not inputs:
      return self, ()
    if self.closed:
      error = f"CancelledError: FIFOQueue '{self.name}' is closed."
      return self, (Completed(None, "enqueue", error=error),)
    inside = (*self.tokens, *inputs)
    served = tuple(
      Completed(id, "dequeue", token)
      for id, token in zip(self.pending, inside, strict=False)
    )
    number = len(served)
    new = dataclasses.replace(
      self, tokens=inside[number:], pending=self.pending[number:]
    )
    return new, served

  def dequeue(self, id: Hashable) -> tuple[TokenQueue, tuple[Completed, ...]]:
    """Requests the next token; waits if there is none."""
    if self.tokens:
      token, *rest = self.tokens
      new = dataclasses.replace(self, tokens=tuple(rest))
      return new, (Completed(id, "dequeue", token),)
    if self.closed:
      return self, (Completed(id, "dequeue", error=self._drained()),)
    return dataclasses.replace(self, pending=(*self.pending, id)), ()

  def cancel(
    self, id: Hashable, error: str = DEQUEUE_CANCELLED
  ) -> tuple[TokenQueue, tuple[Completed, ...]]:
    """Cancels a pending dequeue."""
    if id not in self.pending:
      return self, ()
    pending = tuple(other for other in self.pending if other != id)
    new = dataclasses.replace(self, pending=pending)
    return new, (Completed(id, "dequeue", error=error),)

  def close(self) -> tuple[TokenQueue, tuple[Completed, ...]]:
    """Closes it: queued tokens can still be dequeued, then dequeues fail."""
    ended = (
      Completed(id, "dequeue", error=self._drained()) for id in self.pending
    )
    new = dataclasses.replace(self, pending=(), closed=True)
    return new, tuple(ended)

  def _drained(self) -> str:
    return (
      f"OutOfRangeError: FIFOQueue '{self.name}' is closed and has "
      "insufficient elements (requested 1, current size 0)"
    )
