"""Encodes one replica's gradients, with error feedback."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optax_dist.coordinator.aggregation import layout as layouts
from optax_dist.coordinator.aggregation import means, wire_formats
from optax_dist.coordinator.aggregation.error_feedback import ErrorFeedback

# A smaller leaf is copied: to send it by itself would cost more.
_IN_PLACE = 64 << 10


class Encoder:
  """Encodes gradients, and reads means.

  Attributes:
    place: the layout of gradients.
    mean_place: the layout of means; it has the same elements.
    mean_feedback: the residuals of this replica's means; None if means are not sent
      in few bits.

  Example:
    >>> encoder = Encoder([np.zeros(3, np.float32)], "float32")
    >>> raw = np.zeros(encoder.place.nbytes, np.uint8)
    >>> encoder.write([np.ones(3, np.float32)], raw) is not None
    True
    >>> encoder.read(raw)
    [array([1., 1., 1.], dtype=float32)]
  """

  def __init__(
    self,
    template: Sequence[Any],
    wire: str,
    error_feedback: float = 1.0,
    *,
    mean_wire: str | None = None,
    mean_decay: float = 1.0,
  ):
    """Creates an encoder.

    Args:
      template: leaves that have a shape and a dtype.
      wire: one of `wire_formats.WIRES`.
      error_feedback: the share of what a wire of few bits left out that is added
        to the next gradient.
      mean_wire: wire format of means; None: `wire_formats.mean_wire`.
      mean_decay: the share of a mean's residual that is added to the next one.

    Raises:
      ValueError: the two wire formats don't fit.
    """
    mean_wire = mean_wire or wire_formats.mean_wire(wire)
    wire_formats.check_mean_wire(wire, mean_wire)
    self.place = layouts.layout(template, wire)
    self.mean_place = layouts.layout(template, mean_wire, like=self.place)
    self.mean_feedback: ErrorFeedback | None = None
    if wire_formats.feeds_back(mean_wire):
      self.mean_feedback = ErrorFeedback(self.place.elements, mean_decay)
    self._feedback: ErrorFeedback | None = None
    if wire_formats.feeds_back(wire):
      self._feedback = ErrorFeedback(self.place.elements, error_feedback)
    # What gradients without an outcome leave out, by their numbers.
    self._left_out: dict[int, np.ndarray] = {}

  def write(
    self,
    leaves: Sequence[Any],
    out: np.ndarray,
    number: int = 0,
    extends: int = -1,
    in_place: bool = False,
  ) -> list[memoryview] | None:
    """Encodes a gradient; `settle` takes its outcome.

    Args:
      leaves: arrays, in the order of the template. Of one that is shorter than
        there, nobody reads the rest.
      out: uint8 of `place.nbytes`.
      number: identifies it for `settle`.
      extends: the number of an earlier one that is part of this sum.
      in_place: whether large arrays of JAX's stay where they are, if they are
        sent as they are.

    Returns:
      The gradient's bytes, in order; None if not all numbers are finite.
    """
    whole = [out.data]
    if self._feedback is not None:
      error = self._feedback.residual(0, self.place.elements)
      if not means.write(leaves, self.place, out, error):
        return None
      # What it extends may have an outcome of its own; all others are obsolete.
      self._left_out = {n: e for n, e in self._left_out.items() if n == extends}
      self._left_out[number] = error
      return whole
    stay = self._staying(leaves) if in_place else {}
    if not means.write(leaves, self.place, out, but=stay):
      return None
    if not means.is_finite(list(stay.values())):
      return None
    return self._around(stay, out.data) if stay else whole

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

  def settle(self, number: int, applied: bool | None) -> None:
    """Handles the outcome of a gradient.

    Residuals change only by gradients that are known to count: if one was dropped,
    the residual sent with it has not arrived.

    Args:
      number: as in `write`.
      applied: whether it counts; None if unknown: then the residual is dropped,
        because it might be added twice.
    """
    error = self._left_out.pop(number, None)
    if error is None or applied is False:
      return
    assert self._feedback is not None
    if applied:
      self._feedback.keep(error, 0)
    else:
      self._feedback.clear()
    # Gradients that it extends, or that extend it, are obsolete.
    self._left_out.clear()

  def no_mean(self) -> np.ndarray:
    """The bytes of a mean of zeros."""
    out = np.zeros(self.mean_place.nbytes, np.uint8)
    leaves = self.mean_place.leaves
    zeros = [np.zeros(leaf.shape, leaf.dtype) for leaf in leaves]
    means.write(zeros, self.mean_place, out)
    return out

  def read(self, mean: bytes | np.ndarray) -> list[np.ndarray]:
    """The leaves of a mean: views, or float32 if it was sent in few bits.

    Raises:
      ValueError: it has another size than the layout.
    """
    raw = np.frombuffer(mean, np.uint8)
    if raw.nbytes != self.mean_place.nbytes:
      raise ValueError(
        f"A mean of this model has {self.mean_place.nbytes:,} bytes, got"
        f" {raw.nbytes:,}."
      )
    return means.read(self.mean_place, raw)
