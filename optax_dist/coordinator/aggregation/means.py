"""Leaves as the bytes of their layout, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optax_dist.coordinator.aggregation import layout as layouts
from optax_dist.coordinator.aggregation import wire_formats as wires
from optax_dist.coordinator.aggregation.layout import CHUNK

# A smaller leaf is copied: to send it by itself would cost more.
_IN_PLACE = 64 << 10


def write(
  leaves: Sequence[Any],
  layout: layouts.Layout,
  out: np.ndarray,
  in_place: bool = False,
) -> list[memoryview] | None:
  """Encodes leaves into a buffer of their layout.

  Args:
    leaves: arrays, in the order of the layout. If a leaf is shorter than in the layout,
      the rest of its bytes is never read.
    layout: their layout.
    out: uint8, of `layout.nbytes`.
    in_place: whether large JAX arrays whose bytes need no encoding are not copied.

  Returns:
    Their bytes, in order; None if not all numbers are within their bounds.

  Example:
    >>> leaves = [np.ones(3, np.float32)]
    >>> layout = layouts.layout(leaves)
    >>> out = np.zeros(layout.nbytes, np.uint8)
    >>> write(leaves, layout, out) is not None
    True
    >>> read(layout, out)
    [array([1., 1., 1.], dtype=float32)]
  """
  # The bytes of arrays that stay, by where they begin.
  stay: dict[int, memoryview] = {}
  for leaf, array in zip(layout.leaves, leaves, strict=True):
    codec = leaf.codec
    stays = in_place and _may_stay(array, leaf, codec)
    if (
      isinstance(array, jax.Array)
      and leaf.size >= CHUNK
      and isinstance(codec, wires.Plain)
    ):
      # Converted on the device, so that fewer bytes leave it.
      array = array.astype(codec.stored, copy=False)
    flat = np.asarray(array).reshape(-1)
    rest = out[leaf.begin : leaf.end]
    for start in range(0, flat.size, CHUNK):
      numbers = flat[start : start + CHUNK]
      if isinstance(codec, wires.Plain) and flat.dtype != codec.stored:
        # Checked as it is sent: some are rounded to infinity.
        with np.errstate(over="ignore"):
          numbers = numbers.astype(codec.stored)
      if not _are_within(numbers, codec, leaf.most):
        return None
      if not stays:
        nbytes = codec.nbytes(numbers.size)
        codec.encode(numbers, rest[:nbytes])
        rest = rest[nbytes:]
    if stays:
      stay[leaf.begin] = flat.view(np.uint8).data
    else:
      rest[:] = 0
  parts, end = [], 0
  for start in sorted(stay):
    parts += [out.data[end:start], stay[start]]
    end = start + stay[start].nbytes
  return [*parts, out.data[end:]]


def _may_stay(array: Any, leaf: layouts.Leaf, codec: wires.Codec) -> bool:
  """Whether an array can be sent from where it is.

  A NumPy array may change after an interrupted step, one of JAX's never does: if
  it is donated while it is read, the program gets a copy.
  """
  return (
    isinstance(array, jax.Array)
    and array.nbytes >= _IN_PLACE
    and array.size == leaf.size
    and isinstance(codec, wires.Plain)
    and codec.stored == leaf.dtype
  )


def _are_within(numbers: np.ndarray, codec: wires.Codec, most: float) -> bool:
  """Whether all are from -most to most; NaN is not."""
  if math.isinf(most):
    return True
  wide = numbers.astype(codec.work, copy=False)
  reals = wide.view(wide.real.dtype)
  return bool(
    -most <= np.minimum.reduce(reals) and np.maximum.reduce(reals) <= most
  )


def read(layout: layouts.Layout, raw: bytes | np.ndarray) -> list[np.ndarray]:
  """The leaves of a mean, from its bytes; see `wire_formats.Plain.read`.

  Raises:
    ValueError: it has another size than the layout.
  """
  raw = np.frombuffer(raw, np.uint8)
  if raw.nbytes != layout.nbytes:
    raise ValueError(
      f"A mean of this model has {layout.nbytes:,} bytes, got {raw.nbytes:,}."
    )
  leaves = []
  for leaf in layout.leaves:
    flat = leaf.codec.read(raw[leaf.begin : leaf.end])
    leaves.append(flat[: leaf.size].reshape(leaf.shape))
  return leaves
