"""The layout of a tree's leaves in a flat buffer, and its cuts.

All replicas make the same layout from the same shapes, so nothing but bytes
need travel. Leaves of one dtype lie side by side, each from a multiple of its codec's
quantum on; a buffer is never put together from parts: it is written once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_dist.coordinator.aggregation import wire_formats as wires

# XLA uses arrays without a copy if their addresses are multiples of this.
ALIGNED_BYTES = 64
# Elements: a multiple of every quantum, and small enough for a core's cache.
CHUNK = 256 * 252


class Leaf(NamedTuple):
  """The position of a leaf.

  Attributes:
    shape: shape of the leaf.
    dtype: dtype of the leaf.
    codec: how it is encoded.
    size: its number of elements.
    begin: the first of its bytes.
    end: the end of them.
    most: the largest number that may be sent; see `Layout.bounded`.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  codec: wires.Codec
  size: int
  begin: int
  end: int
  most: float


class DtypeBuffer(NamedTuple):
  """Leaves of one dtype with the same encoding.

  Attributes:
    codec: how they are encoded.
    start: the first of its elements, counted over all groups.
    elements: how many there are, a multiple of the codec's quantum.
    offset: the first of its bytes.
  """

  codec: wires.Codec
  start: int
  elements: int
  offset: int

  def byte(self, position: int) -> int:
    """Where the element at a position, counted over all groups, begins."""
    return self.offset + self.codec.nbytes(position - self.start)


class Chunk(NamedTuple):
  """A range within one group, small enough for a core's cache.

  Attributes:
    codec: codec of the group.
    size: number of its elements.
    bytes: its bytes, from the beginning of the slice that it is part of.
  """

  codec: wires.Codec
  size: int
  bytes: slice


class Layout(NamedTuple):
  """Leaves in a flat buffer; made by `layout`.

  Attributes:
    leaves: their positions, in the order of the tree.
    groups: the groups, in the order of the buffer.
    elements: number of elements in all groups.
    nbytes: size of the buffer.
  """

  leaves: tuple[Leaf, ...]
  groups: tuple[DtypeBuffer, ...]
  elements: int
  nbytes: int

  def bounded(self, terms: int, in_tree: bool = False) -> Layout:
    """The layout with bounds for gradients that are added up in a step.

    Args:
      terms: how many gradients are added up. A number so large that the sum could
        overflow counts as not finite, since the mean would not be. 0 for no bounds.
      in_tree: whether partial sums are sent, too; see `tree_sums`.
    """
    leaves = [
      leaf._replace(most=wires.largest(leaf.dtype, leaf.codec, terms, in_tree))
      for leaf in self.leaves
    ]
    return self._replace(leaves=tuple(leaves))

  def cuts(self, parts: int) -> tuple[int, ...]:
    """Cuts the elements into nearly equal parts: `parts + 1` positions.

    A cut lies where every codec allows one.
    """
    bounds = [0]
    for i in range(1, parts):
      bounds.append(max(bounds[-1], self._allowed(self.elements * i // parts)))
    return (*bounds, self.elements)

  def _allowed(self, position: int) -> int:
    for group in self.groups:
      inside = position - group.start
      if 0 <= inside < group.elements:
        return position - inside % group.codec.quantum
    return position

  def _ranges(
    self, start: int, stop: int
  ) -> list[tuple[DtypeBuffer, int, int]]:
    """The part of a slice in each group."""
    ranges = [
      (group, max(start, group.start), min(stop, group.start + group.elements))
      for group in self.groups
    ]
    return [
      (group, first, last) for group, first, last in ranges if first < last
    ]

  def bytes_of(self, start: int, stop: int) -> tuple[int, int]:
    """The bytes between two positions from `cuts`."""
    ranges = self._ranges(start, stop)
    if not ranges:
      return 0, 0
    (group, first, _), (last_group, _, last) = ranges[0], ranges[-1]
    return group.byte(first), last_group.byte(last)

  def chunks(self, start: int, stop: int) -> Iterator[Chunk]:
    """The chunks between two positions from `cuts`."""
    base, _ = self.bytes_of(start, stop)
    for group, first, last in self._ranges(start, stop):
      begin = group.byte(first) - base
      for low in range(first, last, CHUNK):
        size = min(last - low, CHUNK)
        end = begin + group.codec.nbytes(size)
        yield Chunk(group.codec, size, slice(begin, end))
        begin = end


def layout(leaves: Sequence[Any], wire: str = "float32") -> Layout:
  """Creates the layout of leaves with a shape and a dtype, for a single gradient.

  Args:
    leaves: arrays or `jax.ShapeDtypeStruct`s.
    wire: see `wire_formats.codec`.

  Example:
    >>> buffers = layout([np.zeros((2, 3)), np.zeros(5, np.int32), np.zeros(65)])
    >>> [(leaf.begin, leaf.end) for leaf in buffers.leaves], buffers.nbytes
    ([(0, 48), (768, 788), (128, 648)], 832)
  """
  dtypes = list(dict.fromkeys(np.dtype(leaf.dtype) for leaf in leaves))
  codecs = [wires.codec(wire, dtype) for dtype in dtypes]
  filled = [0] * len(dtypes)
  sizes = [int(np.prod(leaf.shape, dtype=np.int64)) for leaf in leaves]
  # Each leaf's group, and its first element in that group.
  positions = []
  for leaf, size in zip(leaves, sizes, strict=True):
    group = dtypes.index(np.dtype(leaf.dtype))
    positions.append((group, filled[group]))
    quantum = codecs[group].quantum
    filled[group] += -(-size // quantum) * quantum
  groups = []
  start = offset = 0
  for codec, elements in zip(codecs, filled, strict=True):
    groups.append(DtypeBuffer(codec, start, elements, offset))
    start += elements
    nbytes = codec.nbytes(elements)
    offset += -(-nbytes // ALIGNED_BYTES) * ALIGNED_BYTES
  places = []
  for leaf, size, (group, first) in zip(leaves, sizes, positions, strict=True):
    codec, dtype = codecs[group], np.dtype(leaf.dtype)
    begin = groups[group].offset + codec.nbytes(first)
    end = begin + codec.nbytes(size)
    most = wires.largest(dtype, codec, 1)
    shape = tuple(leaf.shape)
    places.append(Leaf(shape, dtype, codec, size, begin, end, most))
  return Layout(tuple(places), tuple(groups), start, offset)
