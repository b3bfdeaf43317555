"""Encoded gradients, added up in the order of a fixed tree.

All additions of micro-batches are made here, on the numbers as they are sent, both by
the replica that computed them and by the replica that averages a slice. So a sum has
the same bits on any replica: each addition is made in the codec's `work` dtype and
rounded to the dtype that is sent (and NumPy, unlike XLA, keeps denormals).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_dist.coordinator.aggregation import layout as layouts
from optax_dist.coordinator.aggregation import means, tree_sums
from optax_dist.ledger import spans as sp
from optax_dist.ledger import tree
from optax_dist.ledger.spans import Span


class PartialSums(NamedTuple):
  """The sum of some micro-batches; its arrays do not change once it is submitted.

  Attributes:
    spans: the nodes of the tree, sorted; see `ledger.tree`.
    arrays: the encoded sum of each, uint8.
    work: what the coordinator must know of the micro-batches; opaque here.
  """

  spans: tuple[Span, ...]
  arrays: tuple[np.ndarray, ...]
  work: bytes = b""

  def digest(self) -> bytes:
    """16 bytes, equal for equal numbers; it reads all of them."""
    hashed = hashlib.blake2b(digest_size=16)
    for array in self.arrays:
      hashed.update(array.data)
    return hashed.digest()


class Summing:
  """Encodes the micro-batches of a replica, and adds them up.

  Example:
    >>> layout = layouts.layout([np.zeros(3, np.float32)])
    >>> memory = lambda: memoryview(bytearray(layout.nbytes))
    >>> summing = Summing(layout, slots=4, allocate=memory)
    >>> one = summing.encode(2, [np.ones(3, np.float32)])
    >>> total = summing.add(one, summing.encode(3, [np.full(3, 2.0, "f")]))
    >>> total.spans, total.arrays[0].view("f")[:3].tolist()
    (((2, 4),), [3.0, 3.0, 3.0])
  """

  def __init__(
    self,
    layout: layouts.Layout,
    slots: int,
    allocate: Callable[[], memoryview],
  ):
    """Sets what is added up, and where.

    Args:
      layout: the layout of a gradient.
      slots: how many micro-batches a step has.
      allocate: memory for one gradient.
    """
    self._layout, self._slots = layout.bounded(slots, in_tree=True), slots
    # The bytes between leaves are never read. They are set to zeros, so that equal
    # gradients have equal bytes, and equal digests.
    self._gaps = list(_gaps(layout))
    self._allocate = allocate

  def encode(self, slot: int, leaves: Sequence[Any]) -> PartialSums | None:
    """The gradient of one micro-batch; None if not all numbers are finite.

    Args:
      slot: the number of the micro-batch in its step.
      leaves: arrays, in the order of the layout.
    """
    out = self._array()
    if not means.write(leaves, self._layout, out):
      return None
    for gap in self._gaps:
      out[gap] = 0
    return PartialSums(((slot, slot + 1),), (out,))

  def zeros(self, slot: int) -> PartialSums:
    """A gradient of zeros."""
    out = self._array()
    out[:] = 0
    return PartialSums(((slot, slot + 1),), (out,))

  def _array(self) -> np.ndarray:
    return np.frombuffer(self._allocate(), np.uint8)

  def add(self, total: PartialSums, more: PartialSums) -> PartialSums:
    """The sum of both.

    Args:
      total: stays as it is, for it may be on its way to others.
      more: the sum of one micro-batch, from `encode`; its memory is reused for the sum.
    """
    spans = (*total.spans, *more.spans)
    rows = (*total.arrays, *more.arrays)
    wanted = tree.nodes(sp.union(spans), self._slots)
    order = tree.additions(spans, wanted)
    by_span = dict(zip(spans, rows, strict=True))
    for span in wanted:
      if span not in by_span:
        out = by_span[span] = more.arrays[0]
        self._make(rows, order, [s[0] for s in spans].index(span[0]), out)
    arrays = tuple([by_span[span] for span in wanted])
    return PartialSums(wanted, arrays, total.work + more.work)

  @np.errstate(all="ignore")
  def _make(
    self,
    rows: Sequence[np.ndarray],
    order: Sequence[tuple[int, int]],
    row: int,
    out: np.ndarray,
  ) -> None:
    """Makes the additions, and writes the sum that is then in a row."""
    for chunk in self._layout.chunks(0, self._layout.elements):
      some = [array[chunk.bytes] for array in rows]
      out[chunk.bytes] = tree_sums.tree_sum(chunk.codec, some, order)[row]


def _gaps(layout: layouts.Layout) -> Iterator[slice]:
  end = 0
  for start, stop in sorted((leaf.begin, leaf.end) for leaf in layout.leaves):
    yield slice(end, start)
    end = stop
  yield slice(end, layout.nbytes)
