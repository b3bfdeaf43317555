"""The bytes of an array, in one piece or where its numbers were computed."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Sequence

import numpy as np


class Scattered:
  """The bytes of an encoded gradient or of a state, read-only.

  Example:
    >>> scattered = Scattered([memoryview(b"abc"), memoryview(b"defg")])
    >>> [bytes(part) for part in scattered.parts(1, 5)]
    [b'bc', b'de']
    >>> bytes(scattered.read(1, 5))
    b'bcde'
  """

  def __init__(self, parts: Sequence[memoryview]):
    """Takes its bytes, in order."""
    self._parts = parts
    self._ends = list(itertools.accumulate(part.nbytes for part in parts))

  def parts(self, low: int, high: int) -> list[memoryview]:
    """The bytes from `low` to `high`, where they are."""
    arrays = []
    index = bisect.bisect_right(self._ends, low)
    while low < high:
      end, part = self._ends[index], self._parts[index]
      stop, start = min(high, end), end - part.nbytes
      if low < stop:
        arrays.append(part[low - start : stop - start])
        low = stop
      index += 1
    return arrays

  def read(self, low: int, high: int) -> np.ndarray:
    """The bytes from `low` to `high`; a copy only if they are not in one piece."""
    arrays = [np.frombuffer(part, np.uint8) for part in self.parts(low, high)]
    return (
      arrays[0] if len(arrays) == 1 else np.concatenate([_NOTHING, *arrays])
    )


_NOTHING = np.zeros(0, np.uint8)
