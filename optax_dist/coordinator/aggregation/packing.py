"""A gradient that is written into its buffer while its front is on its way.

Only of numbers that travel as they are: then every byte is known before the ones
beside it are, and what is in the buffer is the same however it was cut.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from optax_dist.coordinator.aggregation import layout as layouts

# Pieces end at multiples of this many bytes, and so between two numbers.
_ALIGNED = 64


class Packing:
  """Writes leaves into a buffer of their layout, a piece at a time.

  It begins anywhere and goes around, so that what others wait for comes first.

  Attributes:
    done: whether all is written.

  Example:
    >>> place = layouts.layout([np.zeros(64, np.float32)])
    >>> out = np.zeros(place.nbytes, np.uint8)
    >>> packing = Packing([np.ones(64, np.float32)], place, out)
    >>> packing.begin_at(128)
    >>> packing.go_on(64)
    >>> packing.front(128, 256), packing.front(0, 128), packing.done
    (64, 0, False)
    >>> packing.go_on(192)
    >>> packing.done, bool((out.view(np.float32) == 1).all())
    (True, True)
  """

  def __init__(
    self,
    leaves: Sequence[np.ndarray],
    place: layouts.Layout,
    out: np.ndarray,
  ):
    """Makes one that has written nothing.

    Args:
      leaves: arrays, in the order of the layout; nobody may write to them until
        it is done.
      place: their layout; no codec of it is one of blocks.
      out: uint8, of `place.nbytes`.
    """
    self._place, self._out = place, out
    places = [place.bytes_of_leaf(leaf) for leaf in place.leaves]
    flat = [np.asarray(leaf).reshape(-1) for leaf in leaves]
    # In the order of the buffer; leaves without numbers have no place.
    found = sorted(
      (start, stop, i) for i, (start, stop) in enumerate(places) if start < stop
    )
    self._starts = [start for start, _, _ in found]
    self._stops = [stop for _, stop, _ in found]
    self._flat = [flat[i] for _, _, i in found]
    self._codecs = [
      place.groups[place.leaves[i].group].codec for _, _, i in found
    ]
    self._first = self._written = 0
    self.done = not place.nbytes

  def begin_at(self, position: int) -> None:
    """Has it begin at a byte; nothing happens if it has begun already.

    Args:
      position: a cut of the layout, or its end.
    """
    if not self._written:
      self._first = position % max(1, self._out.size)

  def go_on(self, nbytes: int) -> None:
    """Writes about so many bytes more, if there are so many."""
    total = self._out.size
    while nbytes > 0 and not self.done:
      low = (self._first + self._written) % total
      most = min(total, self._first if low < self._first else total)
      end = min(most, -(-(low + nbytes) // _ALIGNED) * _ALIGNED)
      self._write(low, end)
      self._written += end - low
      nbytes -= end - low
      self.done = self._written == total

  def front(self, low: int, high: int) -> int:
    """Of the bytes from `low` to `high`, how many at the front are there."""
    total = self._out.size
    if self.done:
      return high - low
    end = self._first + self._written
    if low >= self._first:
      return max(0, min(high, end) - low)
    # What is before the first byte comes last.
    return max(0, min(high, end - total) - low)

  def _write(self, low: int, high: int) -> None:
    index = max(0, bisect.bisect_right(self._starts, low) - 1)
    while index < len(self._starts) and self._starts[index] < high:
      start, stop = self._starts[index], self._stops[index]
      first, last = max(low, start), min(high, stop)
      if first < last:
        codec = self._codecs[index]
        size = codec.nbytes(1)
        numbers = self._flat[index][
          (first - start) // size : (last - start) // size
        ]
        codec.encode(numbers, self._out[first:last])
      index += 1
