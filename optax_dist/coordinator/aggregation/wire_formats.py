"""Wire formats of numbers: unchanged, as bfloat16, or as integers with scales.

A codec converts a range of elements to bytes and back. Ranges begin and end at
multiples of its `quantum`, so any number of replicas can cut a buffer alike.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import ml_dtypes
import numpy as np

WIRES = ("float32", "bfloat16", "int8")


class Plain:
  """Numbers as they are, or rounded to a narrower dtype.

  Attributes:
    stored: the dtype in which they are sent.
    work: the dtype in which sums are formed.
    is_exact: whether both are the same.
    quantum: number of elements that must not be split.
  """

  quantum = 16

  def __init__(self, dtype: np.dtype, stored: np.dtype | None = None):
    dtype = np.dtype(dtype)
    self.stored = dtype if stored is None else np.dtype(stored)
    small = is_floating(dtype) and dtype.itemsize < 4
    # Sums of half-precision numbers are formed in float32, and rounded once.
    self.work = np.dtype(np.float32) if small else dtype
    self.is_exact = self.stored == self.work

  def nbytes(self, elements: int) -> int:
    """The encoded size of elements."""
    return elements * self.stored.itemsize

  def encode(self, numbers: np.ndarray, out: np.ndarray) -> None:
    """Encodes numbers of the work dtype as `nbytes` bytes (uint8)."""
    out.view(self.stored)[:] = numbers

  def decode(self, raw: np.ndarray) -> np.ndarray:
    """The numbers, in the work dtype; possibly a view."""
    return raw.view(self.stored).astype(self.work, copy=False)

  def read(self, raw: np.ndarray) -> np.ndarray:
    """The numbers in the dtype in which they are sent."""
    return raw.view(self.stored)


class Int8:
  """Integers of 8 bits for float32, times a scale for each block.

  A block is 252 numbers in 256 bytes: the scale in float32, then the integers. The
  last one is filled up with zeros.

  It has the attributes and methods of `Plain`; what it reads is float32.

  Source: block-wise quantization (Dettmers et al. 2021, 8-bit Optimizers via
  Block-wise Quantization).

  Example:
    >>> codec, raw = Int8(), np.zeros(256, np.uint8)
    >>> codec.encode(np.linspace(-127, 127, 252, dtype=np.float32), raw)
    >>> codec.decode(raw)[:4]
    array([-127., -126., -125., -124.], dtype=float32)
  """

  work = np.dtype(np.float32)
  quantum = 252

  def nbytes(self, elements: int) -> int:
    return -(-elements // self.quantum) * 256

  def encode(self, numbers: np.ndarray, out: np.ndarray) -> None:
    whole_blocks = np.pad(numbers, (0, -numbers.size % self.quantum))
    blocks, raw = whole_blocks.reshape(-1, self.quantum), out.reshape(-1, 256)
    scale = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
    # A divisor of 1 for a block of zeros or tiny numbers, whose scale is too small.
    safe = np.where(scale > np.finfo(np.float32).tiny, scale, np.float32(1))
    whole = np.clip(np.rint(blocks / safe), -127, 127)
    raw[:, :4] = scale.view(np.uint8)
    raw[:, 4:].view(np.int8)[:] = whole

  def decode(self, raw: np.ndarray) -> np.ndarray:
    rows = raw.reshape(-1, 256)
    scale = np.ascontiguousarray(rows[:, :4]).view(np.float32)
    return (rows[:, 4:].view(np.int8) * scale).reshape(-1)

  read = decode


Codec: TypeAlias = Plain | Int8


def is_floating(dtype: np.dtype) -> bool:
  """Whether numbers of this dtype are floating-point ones, narrow ones included.

  Example:
    >>> is_floating(np.dtype(ml_dtypes.bfloat16)), is_floating(np.dtype(int))
    (True, False)
  """
  try:
    ml_dtypes.finfo(dtype)
  except ValueError:
    return False
  return True


def largest(
  dtype: np.dtype, codec: Codec, terms: int, in_tree: bool = False
) -> float:
  """The largest number of which `terms` can be added up without overflow.

  Args:
    dtype: dtype of the numbers.
    codec: how they are encoded.
    terms: how many are added up; 0 for no bound.
    in_tree: whether partial sums are encoded, and so rounded, too.

  Returns:
    The number, as it is sent; infinity for integers, and without a bound.

  Example:
    >>> float32 = np.dtype("float32")
    >>> float(f"{largest(float32, codec('float32', float32), 2):.2g}")
    1.7e+38
  """
  if not (terms and (is_floating(dtype) or dtype.kind == "c")):
    return math.inf
  summed = codec.work
  if in_tree and isinstance(codec, Plain):
    summed = codec.stored
  info = ml_dtypes.finfo(summed)
  # Each partial sum is rounded, perhaps upwards, and again when it is sent.
  additions = (terms - 1).bit_length() if in_tree else terms - 1
  most = float(info.max) / terms / (1 + 2 * float(info.eps)) ** additions
  # Int8 may also round the number itself upwards.
  return most / (1 + 2 * float(info.eps)) if isinstance(codec, Int8) else most


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
      return Plain(dtype, np.dtype(ml_dtypes.bfloat16))
    if wire == "int8":
      return Int8()
  return Plain(dtype)
