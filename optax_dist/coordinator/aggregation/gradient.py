"""An encoded gradient, in one piece or where its numbers were computed."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np


class Gradient:
  """The bytes of an encoded gradient; nobody writes to them.

  Example:
    >>> found = Gradient([memoryview(b"abc"), memoryview(b"defg")])
    >>> [bytes(part) for part in found.parts(1, 5)]
    [b'bc', b'de']
    >>> bytes(found.read(1, 5))
    b'bcde'
  """

  def __init__(self, parts: Sequence[memoryview]):
    """Takes its bytes, in order."""
    self._parts = parts
    self._ends = list(itertools.accumulate(part.nbytes for part in parts))

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
    """The bytes from `low` to `high`; a copy only if they are not in one piece."""
    found = [np.frombuffer(part, np.uint8) for part in self.parts(low, high)]
    return found[0] if len(found) == 1 else np.concatenate([_NOTHING, *found])


_NOTHING = np.zeros(0, np.uint8)
