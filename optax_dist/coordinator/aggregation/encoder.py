"""Encodes one replica's gradients, and reads means."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optax_dist.coordinator.aggregation import layout as layouts
from optax_dist.coordinator.aggregation import means, wire_formats

# A smaller leaf is copied: to send it by itself would cost more.
_IN_PLACE = 64 << 10


class Encoder:
  """Encodes gradients, and reads means.

  Attributes:
    place: the layout of gradients, and of means.

  Example:
    >>> encoder = Encoder([np.zeros(3, np.float32)], "float32")
    >>> raw = np.zeros(encoder.place.nbytes, np.uint8)
    >>> encoder.write([np.ones(3, np.float32)], raw) is not None
    True
    >>> encoder.read(raw)
    [array([1., 1., 1.], dtype=float32)]
  """

  def __init__(self, template: Sequence[Any], wire: str):
    """Creates an encoder.

    Args:
      template: leaves that have a shape and a dtype.
      wire: one of `wire_formats.WIRES`.
    """
    self.place = layouts.layout(template, wire)

  def write(
    self, leaves: Sequence[Any], out: np.ndarray, in_place: bool = False
  ) -> list[memoryview] | None:
    """Encodes a gradient.

    Args:
      leaves: arrays, in the order of the template. Of one that is shorter than
        there, nobody reads the rest.
      out: uint8 of `place.nbytes`.
      in_place: whether large arrays of JAX's stay where they are, if they are
        sent as they are.

    Returns:
      The gradient's bytes, in order; None if not all numbers are finite.
    """
    stay = self._staying(leaves) if in_place else {}
    if not means.write(leaves, self.place, out, but=stay):
      return None
    if not means.is_finite(list(stay.values())):
      return None
    return self._around(stay, out.data) if stay else [out.data]

  def _staying(self, leaves: Sequence[Any]) -> dict[int, np.ndarray]:
    """The leaves that are sent from where they are, by index.

    A NumPy array may change after an interrupted step, one of JAX's never does:
    if it is donated while it is read, the program gets a copy.
    """
    return {
      index: np.asarray(leaf).reshape(-1)
      for index, leaf in enumerate(leaves)
      if isinstance(leaf, jax.Array)
      and leaf.nbytes >= _IN_PLACE
      and leaf.size == self.place.leaves[index].size
      and self._is_exact(self.place.leaves[index])
    }

  def _is_exact(self, leaf: layouts.Leaf) -> bool:
    codec = self.place.groups[leaf.group].codec
    return isinstance(codec, wire_formats.Plain) and codec.stored == leaf.dtype

  def _around(
    self, stay: dict[int, np.ndarray], out: memoryview
  ) -> list[memoryview]:
    """What stays, in order, and between it the parts of a buffer."""
    bytes_of = lambda index: self.place.bytes_of_leaf(self.place.leaves[index])
    found, end = [], 0
    for index in sorted(stay, key=bytes_of):
      start, stop = bytes_of(index)
      found += [out[end:start], stay[index].view(np.uint8).data]
      end = stop
    return [*found, out[end:]]

  def read(self, mean: bytes | np.ndarray) -> list[np.ndarray]:
    """The leaves of a mean: views, or float32 if it was sent as integers.

    Raises:
      ValueError: it has another size than the layout.
    """
    raw = np.frombuffer(mean, np.uint8)
    if raw.nbytes != self.place.nbytes:
      raise ValueError(
        f"A mean of this model has {self.place.nbytes:,} bytes, got"
        f" {raw.nbytes:,}."
      )
    return means.read(self.place, raw)
