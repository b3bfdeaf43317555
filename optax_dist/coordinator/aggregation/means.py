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
  but: Container[int] = (),
) -> bool:
  """Encodes leaves into a buffer of their layout.

  Args:
    leaves: arrays, in the order of the layout. Of one that is shorter than there,
      nobody reads the rest.
    place: their layout.
    out: uint8, of `place.nbytes`.
    but: the indices of leaves that are neither encoded nor checked.

  Returns:
    Whether all numbers are finite.
  """
  finite = True
  for index, (leaf, array) in enumerate(zip(place.leaves, leaves, strict=True)):
    if index in but:
      continue
    codec = place.groups[leaf.group].codec
    if leaf.size >= CHUNK and isinstance(codec, wires.Plain):
      # So that fewer bytes leave its device.
      array = array.astype(codec.stored, copy=False)
    flat = np.asarray(array).reshape(-1)
    start, stop = place.bytes_of_leaf(leaf)
    finite &= _write(flat, codec, out[start:stop])
    out[start + codec.nbytes(flat.size) : stop] = 0
  return finite


def _write(flat: np.ndarray, codec: wires.Codec, out: np.ndarray) -> bool:
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


def read(place: layouts.Layout, raw: np.ndarray) -> list[np.ndarray]:
  """The leaves of a mean, from its bytes; see `wire_formats.Codec.read`."""
  leaves = []
  for leaf in place.leaves:
    start, stop = place.bytes_of_leaf(leaf)
    flat = place.groups[leaf.group].codec.read(raw[start:stop])
    leaves.append(flat[: leaf.size].reshape(leaf.shape))
  return leaves
