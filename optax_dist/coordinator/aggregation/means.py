"""Leaves as the bytes of their layout, and back."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import Any

import numpy as np

from optax_dist.coordinator.aggregation import layout as layouts
from optax_dist.coordinator.aggregation import wire_formats as wires
from optax_dist.coordinator.aggregation.layout import CHUNK


# Non-finite numbers may be compared and added here, without warnings.
@np.errstate(all="ignore")
def write(
  leaves: Sequence[Any],
  place: layouts.Layout,
  out: np.ndarray,
  error: np.ndarray | None = None,
  but: Container[int] = (),
) -> bool:
  """Encodes leaves into a buffer of their layout.

  Args:
    leaves: arrays, in the order of the layout. Of one that is shorter than there,
      nobody reads the rest.
    place: their layout.
    out: uint8, of `place.nbytes`.
    error: what earlier encodings of float32 leaves lost, float32 of
      `place.elements`; it is added, and replaced by what is lost now. None
      where nothing is to be fed back.
    but: the indices of leaves that are neither encoded nor checked.

  Returns:
    Whether all numbers are finite.
  """
  finite = True
  for index, group in enumerate(place.groups):
    mine = [
      (leaf, array)
      for i, (leaf, array) in enumerate(zip(place.leaves, leaves, strict=True))
      if leaf.group == index and i not in but
    ]
    if isinstance(group.codec, wires.Plain):
      for leaf, array in mine:
        start, stop = place.bytes_of_leaf(leaf)
        if leaf.size >= CHUNK:  # So that fewer bytes leave its device.
          array = array.astype(group.codec.stored, copy=False)
        flat = np.asarray(array).reshape(-1)
        finite &= _write_plain(flat, group.codec, out[start:stop])
        out[start + group.codec.nbytes(flat.size) : stop] = 0
    else:
      finite &= _write_blocks(mine, place, group, out, error)
  return finite


def _write_plain(flat: np.ndarray, codec: wires.Codec, out: np.ndarray) -> bool:
  finite = True
  exact = flat.dtype.kind not in "fcV"
  for start in range(0, flat.size, CHUNK):
    numbers = flat[start : start + CHUNK]
    first, last = codec.nbytes(start), codec.nbytes(start + numbers.size)
    codec.encode(numbers, out[first:last])
    # Large numbers may be rounded to infinity.
    finite &= exact or _are_finite(codec.decode(out[first:last]))
  return finite


def _are_finite(numbers: np.ndarray) -> bool:
  # The sum of finite numbers may overflow; only then look at each.
  return bool(np.isfinite(np.add.reduce(numbers)) or np.isfinite(numbers).all())


def is_finite(leaves: Sequence[np.ndarray]) -> bool:
  """Whether all numbers are finite.

  Example:
    >>> is_finite([np.ones(3), np.arange(4)]), is_finite([np.array([np.inf])])
    (True, False)
  """
  with np.errstate(all="ignore"):
    return all(
      _are_finite(flat[start : start + CHUNK])
      for flat in (leaf.reshape(-1) for leaf in leaves)
      if flat.dtype.kind in "fcV"
      for start in range(0, flat.size, CHUNK)
    )


def _write_blocks(
  mine: Sequence[tuple[layouts.Leaf, Any]],
  place: layouts.Layout,
  group: layouts.Group,
  out: np.ndarray,
  error: np.ndarray | None,
) -> bool:
  numbers = np.zeros(group.elements, group.codec.work)
  stop = group.start + group.elements
  for leaf, array in mine:
    flat = np.asarray(array).reshape(-1)
    numbers[leaf.start : leaf.start + flat.size] = flat
  if not np.isfinite(numbers).all():
    return False
  if error is not None:
    lost = error[group.start : stop]
    for leaf, array in mine:  # Between leaves nothing is lost.
      here = slice(leaf.start, leaf.start + array.size)
      numbers[here] += lost[here]
  for chunk in place.chunks(group.start, stop):
    piece, raw = numbers[chunk.elements], out[group.offset :][chunk.bytes]
    group.codec.encode(piece, raw)
    if error is not None:
      lost[chunk.elements] = piece - group.codec.decode(raw)
  return True


def read(place: layouts.Layout, raw: np.ndarray) -> list[np.ndarray]:
  """The leaves of a mean: views; numbers in few bits are decoded.

  Args:
    place: the layout of the mean.
    raw: its bytes.

  Returns:
    Arrays in the order of the layout, of the dtype in which they were sent, or
    float32 if that was few bits.
  """
  decoded: dict[int, np.ndarray] = {}
  leaves = []
  for leaf in place.leaves:
    group = place.groups[leaf.group]
    codec = group.codec
    if isinstance(codec, wires.Plain):
      start, stop = place.bytes_of_leaf(leaf)
      flat = raw[start:stop].view(codec.stored)
    else:
      if leaf.group not in decoded:
        decoded[leaf.group] = _decoded(place, group, raw)
      flat = decoded[leaf.group][leaf.start : leaf.start + leaf.size]
    leaves.append(flat.reshape(leaf.shape))
  return leaves


def _decoded(
  place: layouts.Layout, group: layouts.Group, raw: np.ndarray
) -> np.ndarray:
  """The numbers of a group, decoded within a core's cache."""
  out = np.empty(group.elements, group.codec.work)
  for chunk in place.chunks(group.start, group.start + group.elements):
    out[chunk.elements] = group.codec.decode(raw[group.offset :][chunk.bytes])
  return out
