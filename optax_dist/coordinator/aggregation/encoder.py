"""One replica's gradients as bytes, with what a wire format loses fed back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from optax_dist.coordinator.aggregation import layout as layouts
from optax_dist.coordinator.aggregation import means, wire_formats


class Encoder:
  """Encodes gradients, and reads means.

  Attributes:
    place: the layout of gradients.
    mean_place: the layout of means; it has the same elements.

  Example:
    >>> encoder = Encoder([np.zeros(3, np.float32)], "float32")
    >>> raw = np.zeros(encoder.place.nbytes, np.uint8)
    >>> encoder.write([np.ones(3, np.float32)], raw)
    True
    >>> encoder.read(raw)
    [array([1., 1., 1.], dtype=float32)]
  """

  def __init__(self, template: Sequence[Any], wire: str):
    """Makes one.

    Args:
      template: leaves that have a shape and a dtype.
      wire: one of `wire_formats.WIRES`.
    """
    self.place = layouts.layout(template, wire)
    self.mean_place = layouts.layout(
      template, wire_formats.mean_wire(wire), like=self.place
    )
    # Few bits lose much; what is lost is sent with the next gradient.
    self._error = (
      np.zeros(self.place.elements, np.float32)
      if wire_formats.feeds_back(wire)
      else None
    )
    self._next_error: np.ndarray | None = None

  def write(self, leaves: Sequence[Any], out: np.ndarray) -> bool:
    """Encodes a gradient; `settle` takes its outcome.

    Args:
      leaves: arrays, in the order of the template.
      out: uint8 of `place.nbytes`.

    Returns:
      Whether all numbers are finite.
    """
    if self._error is not None:
      self._next_error = self._error.copy()
    return means.write(leaves, self.place, out, self._next_error)

  def settle(self, applied: bool) -> None:
    """The latest gradient was applied, or was not."""
    if applied and self._next_error is not None:
      self._error = self._next_error
    self._next_error = None

  def average(
    self,
    gradients: Sequence[bytes],
    weights: Sequence[float],
    count: int,
  ) -> bytes:
    """The mean of encoded gradients.

    Args:
      gradients: in replica order.
      weights: by which they are multiplied.
      count: by which their sum is divided.

    Raises:
      ValueError: a gradient has another size than the layout.
    """
    for raw in gradients:
      self._check(raw, self.place, "gradient")
    out = np.empty(self.mean_place.nbytes, np.uint8)
    means.mean_slice(
      [np.frombuffer(raw, np.uint8) for raw in gradients],
      weights,
      count,
      self.place,
      self.mean_place,
      0,
      self.place.elements,
      out,
    )
    return out.tobytes()

  def read(self, mean: bytes | np.ndarray) -> list[np.ndarray]:
    """The leaves of a mean, as views.

    Raises:
      ValueError: it has another size than the layout.
    """
    raw = np.frombuffer(mean, np.uint8)
    self._check(raw, self.mean_place, "mean")
    whole = (0, self.mean_place.elements)
    return means.read(self.mean_place, [raw], whole, np.empty(0, np.uint8))

  def _check(
    self, raw: bytes | np.ndarray, place: layouts.Layout, what: str
  ) -> None:
    nbytes = raw.nbytes if isinstance(raw, np.ndarray) else len(raw)
    if nbytes != place.nbytes:
      raise ValueError(
        f"A {what} of this model has {place.nbytes:,} bytes, got {nbytes:,}."
      )
