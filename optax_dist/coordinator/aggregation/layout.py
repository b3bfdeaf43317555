"""The layout of a tree's leaves in a flat buffer, and its cuts.

All replicas make the same layout from the same shapes, so nothing but bytes
need travel. Leaves of one dtype lie side by side, each from a multiple of 16
elements on; a buffer is never put together from parts: it is written once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_dist.coordinator.aggregation import wire_formats as wires

# Elements; float32 then lies where XLA takes it as it is.
_ALIGNED = 16
_ALIGNED_BYTES = 64


class Leaf(NamedTuple):
  """The position of a leaf.

  Attributes:
    shape: of the leaf.
    dtype: of the leaf.
    group: the index of its group.
    start: its first element in the group.
    size: its number of elements.
  """

  shape: tuple[int, ...]
  dtype: np.dtype
  group: int
  start: int
  size: int


class Group(NamedTuple):
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

  @property
  def stop(self) -> int:
    """The byte after its last."""
    return self.offset + self.codec.nbytes(self.elements)


class Part(NamedTuple):
  """A range within one group.

  Attributes:
    group: the group.
    start: the first byte in the buffer.
    stop: the byte after the last.
    elements: how many numbers it holds.
  """

  group: Group
  start: int
  stop: int
  elements: int


@dataclasses.dataclass(frozen=True)
class Layout:
  """Leaves in a flat buffer; made by `layout`.

  Attributes:
    leaves: their positions, in the order of the tree.
    groups: in the order of the buffer.
    elements: number of elements in all groups.
    nbytes: size of the buffer.
  """

  leaves: tuple[Leaf, ...]
  groups: tuple[Group, ...]
  elements: int
  nbytes: int
  # A cache; a run uses few numbers of parts.
  _cuts: dict[int, tuple[int, ...]] = dataclasses.field(
    default_factory=dict, repr=False, compare=False
  )
  _parts: dict[tuple[int, int], list[Part]] = dataclasses.field(
    default_factory=dict, repr=False, compare=False
  )

  def cuts(self, parts: int) -> tuple[int, ...]:
    """Cuts the elements into nearly equal parts: `parts + 1` positions.

    A cut lies where every codec allows one.
    """
    if parts not in self._cuts:
      self._cuts[parts] = self._find_cuts(parts)
    return self._cuts[parts]

  def _find_cuts(self, parts: int) -> tuple[int, ...]:
    found = [0]
    for i in range(1, parts):
      found.append(max(found[-1], self._allowed(self.elements * i // parts)))
    return (*found, self.elements)

  def _allowed(self, position: int) -> int:
    for group in self.groups:
      inside = position - group.start
      if 0 <= inside < group.elements:
        return position - inside % group.codec.quantum
    return position

  def parts(self, start: int, stop: int) -> list[Part]:
    """The ranges of groups between two positions from `cuts`."""
    if (start, stop) not in self._parts:
      self._parts[start, stop] = self._find_parts(start, stop)
    return self._parts[start, stop]

  def _find_parts(self, start: int, stop: int) -> list[Part]:
    found = []
    for group in self.groups:
      first = max(start, group.start)
      last = min(stop, group.start + group.elements)
      if first < last:
        nbytes = group.codec.nbytes
        found.append(
          Part(
            group,
            group.offset + nbytes(first - group.start),
            group.offset + nbytes(last - group.start),
            last - first,
          )
        )
    return found

  def bytes_of(self, start: int, stop: int) -> tuple[int, int]:
    """The bytes between two positions from `cuts`."""
    parts = self.parts(start, stop)
    return (parts[0].start, parts[-1].stop) if parts else (0, 0)

  def bytes_of_leaf(self, leaf: Leaf) -> tuple[int, int]:
    """A leaf's bytes; only for codecs without blocks."""
    group = self.groups[leaf.group]
    nbytes = group.codec.nbytes
    start = group.offset + nbytes(leaf.start)
    return start, start + nbytes(leaf.size)


def layout(
  leaves: Sequence[Any], wire: str = "float32", like: Layout | None = None
) -> Layout:
  """Creates the layout of leaves with a shape and a dtype.

  Args:
    leaves: arrays or `jax.ShapeDtypeStruct`s.
    wire: see `wire_formats.codec`.
    like: a layout of the same leaves on another wire; positions of its `cuts`
      then hold for both.

  Example:
    >>> found = layout([np.zeros((2, 3)), np.zeros(5, np.int32), np.zeros(65)])
    >>> [(leaf.group, leaf.start) for leaf in found.leaves], found.nbytes
    ([(0, 0), (1, 0), (0, 16)], 832)
  """
  dtypes = list(dict.fromkeys(np.dtype(leaf.dtype) for leaf in leaves))
  filled = [0] * len(dtypes)
  places = []
  for leaf in leaves:
    dtype = np.dtype(leaf.dtype)
    group = dtypes.index(dtype)
    size = int(np.prod(leaf.shape, dtype=np.int64))
    places.append(Leaf(tuple(leaf.shape), dtype, group, filled[group], size))
    filled[group] += -(-size // _ALIGNED) * _ALIGNED
  groups = []
  start = offset = 0
  for i, (dtype, elements) in enumerate(zip(dtypes, filled, strict=True)):
    codec = wires.codec(wire, dtype)
    elements = -(-elements // codec.quantum) * codec.quantum
    if like is not None:
      elements = like.groups[i].elements
    groups.append(Group(codec, start, elements, offset))
    start += elements
    nbytes = codec.nbytes(elements)
    offset += -(-nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES
  return Layout(tuple(places), tuple(groups), start, offset)
