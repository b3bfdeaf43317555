"""Wire formats of numbers: unchanged, as bfloat16, or low-bit with scales.

A codec converts a range of elements to bytes and back. Ranges begin and end at
multiples of its `quantum`, so any number of replicas can cut a buffer alike.
"""

from __future__ import annotations

from typing import Protocol

import jax.numpy as jnp
import numpy as np

from optax_dist.coordinator.aggregation import block_formats


class Codec(Protocol):
  """Encodes flat arrays of one dtype.

  Attributes:
    dtype: dtype of the unencoded numbers.
    work: the dtype in which sums are formed.
    quantum: number of elements that must not be split.
  """

  dtype: np.dtype
  work: np.dtype
  quantum: int

  def nbytes(self, elements: int) -> int:
    """The encoded size of elements, a multiple of the quantum."""
    ...

  def encode(self, numbers: np.ndarray, out: np.ndarray) -> None:
    """Encodes numbers of the work dtype as bytes (uint8)."""
    ...

  def decode(self, raw: np.ndarray) -> np.ndarray:
    """The numbers, in the work dtype; possibly a view."""
    ...


class Plain:
  """Numbers as they are, or rounded to a narrower dtype.

  Attributes:
    stored: the dtype in which they are sent.
    is_exact: whether sums are formed in it, too.
  """

  quantum = 16

  def __init__(self, dtype: np.dtype, stored: np.dtype | None = None):
    self.dtype = np.dtype(dtype)
    self.stored = self.dtype if stored is None else np.dtype(stored)
    small = jnp.issubdtype(self.dtype, jnp.floating) and self.dtype.itemsize < 4
    # Sums of half-precision numbers are formed in float32, and rounded once.
    self.work = np.dtype(np.float32) if small else self.dtype
    self.is_exact = self.stored == self.work

  def nbytes(self, elements: int) -> int:
    return elements * self.stored.itemsize

  def encode(self, numbers: np.ndarray, out: np.ndarray) -> None:
    np.copyto(out.view(self.stored), numbers, casting="same_kind")

  def decode(self, raw: np.ndarray) -> np.ndarray:
    return raw.view(self.stored).astype(self.work, copy=False)


# The block formats by name.
_BLOCKS: dict[str, Codec] = {
  "int8": block_formats.Levels(8),
  "int4": block_formats.Levels(4),
  "int2": block_formats.Levels(2),
  "top_k": block_formats.TopK(),
}
WIRES = ("float32", "bfloat16", *_BLOCKS)


def codec(wire: str, dtype: np.dtype) -> Codec:
  """The codec for leaves of a dtype in a wire format.

  Only float32 is ever shortened: what is narrower already stays as it is, and
  float64 was chosen for its digits.

  Raises:
    ValueError: there is no such wire.

  Example:
    >>> codec("bfloat16", np.dtype("float32")).nbytes(64)
    128
    >>> codec("bfloat16", np.dtype("float64")).nbytes(64)
    512
  """
  if wire not in WIRES:
    raise ValueError(f"wire must be one of {', '.join(WIRES)}, got {wire!r}.")
  if np.dtype(dtype) == np.float32:
    if wire == "bfloat16":
      return Plain(dtype, jnp.dtype(jnp.bfloat16))
    if wire in _BLOCKS:
      return _BLOCKS[wire]
  return Plain(dtype)


def feeds_back(wire: str) -> bool:
  """Whether senders use error feedback with a wire format.

  Example:
    >>> feeds_back("int8"), feeds_back("bfloat16")
    (True, False)
  """
  return wire in _BLOCKS


def mean_wire(wire: str) -> str:
  """The default wire format of the mean.

  A mean in 4 bits does not slow down learning; fewer bits do (docs/coordinator.md).

  Args:
    wire: wire format of the gradients.

  Example:
    >>> mean_wire("int8"), mean_wire("top_k"), mean_wire("float32")
    ('int8', 'int4', 'float32')
  """
  if not feeds_back(wire):
    return wire
  return "int8" if wire == "int8" else "int4"


def check_mean_wire(wire: str, mean: str) -> None:
  """Checks that a wire format of means fits that of the gradients.

  Raises:
    ValueError: it doesn't.

  Example:
    >>> check_mean_wire("int4", "int8")
  """
  if mean not in WIRES:
    raise ValueError(
      f"mean_wire must be one of {', '.join(WIRES)}, got {mean!r}."
    )
  if feeds_back(mean) and not feeds_back(wire):
    raise ValueError(
      f"mean_wire={mean!r} needs a wire of few bits ({', '.join(_BLOCKS)}), got"
      f" wire={wire!r}: gradients are cut into slices by the blocks of their own"
      " wire."
    )
