"""An encoded gradient, in one piece or where its numbers were computed."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from optax_dist.coordinator.transport import sockets


class Gradient:
  """An encoded gradient that is lent to aggregations.

  Attributes:
    users: how many transfers still read it.
    is_shared: whether near processes can read it where it is.

  Example:
    >>> found = Gradient([memoryview(b"abc"), memoryview(b"defg")])
    >>> [bytes(part) for part in found.parts(1, 5)]
    [b'bc', b'de']
    >>> bytes(found.read(1, 5))
    b'bcde'
  """

  def __init__(
    self,
    parts: Sequence[memoryview],
    on_idle: Callable[[], None] | None = None,
  ):
    """Makes one.

    Args:
      parts: its bytes, in order; nobody writes to them.
      on_idle: frees their memory, once it was resolved and nothing reads it any
        more; None: they are in this process's own memory.
    """
    self.users = 0
    self._resolved = False
    self._put(parts, on_idle)

  def _put(
    self, parts: Sequence[memoryview], on_idle: Callable[[], None] | None
  ) -> None:
    self._parts, self._on_idle = parts, on_idle
    self._ends = list(itertools.accumulate(part.nbytes for part in parts))
    self.is_shared = on_idle is not None

  def share(self, transport: sockets.Transport) -> None:
    """Copies it to where near processes can read it."""
    memory = transport.allocate(self._ends[-1])
    np.concatenate(
      [np.frombuffer(part, np.uint8) for part in self._parts],
      out=np.frombuffer(memory, np.uint8),
    )
    self._put([memory], lambda: transport.free(memory))

  def parts(self, low: int, high: int) -> list[memoryview]:
    """The bytes from `low` to `high`, where they are."""
    found = []
    index = bisect.bisect_right(self._ends, low)
    while low < high:
      end, part = self._ends[index], self._parts[index]
      stop, start = min(high, end), end - part.nbytes
      if low < stop:
        found.append(part[low - start : stop - start])
        low = stop
      index += 1
    return found

  def read(self, low: int, high: int) -> np.ndarray:
    """The bytes from `low` to `high`; a copy only if they are apart."""
    found = [np.frombuffer(part, np.uint8) for part in self.parts(low, high)]
    return found[0] if len(found) == 1 else np.concatenate([_NOTHING, *found])

  def resolve(self) -> None:
    """No new transfers will read it."""
    if not self._resolved:
      self._resolved = True
      self._check()

  def done(self) -> None:
    """Removes a user."""
    self.users -= 1
    self._check()

  def _check(self) -> None:
    if self._resolved and not self.users and self._on_idle is not None:
      self._on_idle()


_NOTHING = np.zeros(0, np.uint8)
