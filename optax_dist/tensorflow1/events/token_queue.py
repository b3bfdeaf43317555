"""TensorFlow's FIFO queue of tokens, event for event.

Source: tensorflow/core/kernels/fifo_queue.cc.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterable

from optax_dist.quorum.persistent import Fifo, fifo
from optax_dist.tensorflow1.events.outcomes import Completed

DEQUEUE_CANCELLED = "CancelledError: Dequeue operation was cancelled"


@dataclasses.dataclass(frozen=True, slots=True)
class TokenQueue:
  """The books of an unbounded `FIFOQueue` of steps.

  Attributes:
    name: the queue's, for its errors.
    tokens: what is in, in order.
    waiting: ids of the dequeues that wait, in order.
    closed: whether it has been closed; it can never be opened again.

  Example:
    >>> queue, _ = TokenQueue().dequeue("w0")
    >>> queue, out = queue.enqueue_many([7, 7])
    >>> out[0].id, out[0].value, queue.size
    ('w0', 7, 1)
  """

  name: str = "sync_token_q"
  tokens: Fifo = dataclasses.field(default_factory=Fifo)
  waiting: Fifo = dataclasses.field(default_factory=Fifo)
  closed: bool = False

  @property
  def size(self) -> int:
    """How many tokens are in."""
    return self.tokens.size

  @property
  def pending(self) -> tuple[Hashable, ...]:
    """The ids of the dequeues that wait, in order."""
    return tuple(self.waiting)

  def enqueue_many(
    self, tokens: Iterable[int]
  ) -> tuple[TokenQueue, tuple[Completed, ...]]:
    """Puts tokens in, which first serve the dequeues that wait."""
    given = tuple(tokens)
    if not given:
      return self, ()
    if self.closed:
      error = f"CancelledError: FIFOQueue '{self.name}' is closed."
      return self, (Completed(None, "enqueue", error=error),)
    inside, waiting, served = self.tokens, self.waiting, []
    for token in given:
      inside = inside.push(token)
    while inside.size and waiting.size:
      token, inside = inside.pop()
      id, waiting = waiting.pop()
      served.append(Completed(id, "dequeue", token))
    new = dataclasses.replace(self, tokens=inside, waiting=waiting)
    return new, tuple(served)

  def dequeue(self, id: Hashable) -> tuple[TokenQueue, tuple[Completed, ...]]:
    """Asks for the next token; waits where there is none."""
    if self.tokens.size:
      token, rest = self.tokens.pop()
      new = dataclasses.replace(self, tokens=rest)
      return new, (Completed(id, "dequeue", token),)
    if self.closed:
      return self, (Completed(id, "dequeue", error=self._drained()),)
    return dataclasses.replace(self, waiting=self.waiting.push(id)), ()

  def cancel(
    self, id: Hashable, error: str = DEQUEUE_CANCELLED
  ) -> tuple[TokenQueue, tuple[Completed, ...]]:
    """Ends a dequeue that waits."""
    if id not in self.pending:
      return self, ()
    new = dataclasses.replace(self, waiting=self.waiting.without(id))
    return new, (Completed(id, "dequeue", error=error),)

  def close(self) -> tuple[TokenQueue, tuple[Completed, ...]]:
    """Closes it: what is in can still be had, then every dequeue fails."""
    ended = (
      Completed(id, "dequeue", error=self._drained()) for id in self.pending
    )
    new = dataclasses.replace(self, waiting=fifo(), closed=True)
    return new, tuple(ended)

  def _drained(self) -> str:
    return (
      f"OutOfRangeError: FIFOQueue '{self.name}' is closed and has "
      "insufficient elements (requested 1, current size 0)"
    )
