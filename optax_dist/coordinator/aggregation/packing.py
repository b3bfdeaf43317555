"""Writes a gradient into its buffer while the front is already being sent.

Only for uncompressed numbers: then each byte is independent of its neighbors,
and the buffer's content does not depend on the pieces.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from optax_dist.coordinator.aggregation import layout as layouts

# Pieces end at multiples of this many bytes, so that no number is split.
_ALIGNED = 64


class Packing:
  """Writes leaves into a buffer of their layout, a piece at a time.

  It starts anywhere and wraps around, so that what others wait for comes first.

  Attributes:
    done: whether everything is written.

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
    """Creates it; nothing is written yet.

    Args:
      leaves: arrays, in the order of the layout; they must not be modified
        until it is done.
      place: their layout, without block codecs.
      out: uint8, of `place.nbytes`.
    """
    self._place, self._out = place, out
    places = [place.bytes_of_leaf(leaf) for leaf in place.leaves]
    flat = [np.asarray(leaf).reshape(-1) for leaf in leaves]
    # In the order of the buffer; empty leaves have no position.
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
    """Sets the byte at which to start; no effect if it has started already.

    Args:
      position: a cut of the layout, or its end.
    """
    if not self._written:
      self._first = position % max(1, self._out.size)

  def go_on(self, nbytes: int) -> None:
    """Writes about this many more bytes, if there are as many."""
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
    """How many bytes are written at the front of the range `low` to `high`."""
    total = self._out.size
    if self.done:
      return high - low
    end = self._first + self._written
    if low >= self._first:
      return max(0, min(high, end) - low)
    # Bytes before the starting position are written last.
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
