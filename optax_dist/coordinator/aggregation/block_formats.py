"""Low-bit wire formats: float32 in blocks of 4,032 numbers, with scales.

All are lossy, so senders use error feedback. Each is the NumPy equivalent of a
method of :mod:`optax_dist.compression`, with blocks that cuts never split.
"""

from __future__ import annotations

import numpy as np

NUMBERS = 4032


class _Blocks:
  """What both formats have in common."""

  dtype = np.dtype(np.float32)
  work = np.dtype(np.float32)
  quantum = NUMBERS
  block: int

  def nbytes(self, elements: int) -> int:
    return elements // NUMBERS * self.block


class Levels(_Blocks):
  """Integers of 8, 4 or 2 bits, times a scale for each block.

  Source: block-wise quantization (Dettmers et al. 2021, 8-bit Optimizers via
  Block-wise Quantization; with fewer bits Alistarh et al. 2017, QSGD); the error
  is fed back by the sender (Seide et al. 2014, 1-Bit Stochastic Gradient Descent).
  """

  def __init__(self, bits: int):
    self._bits, self._most = bits, 2 ** (bits - 1) - 1
    self._data = NUMBERS * bits // 8
    self.block = self._data + 16

  def encode(self, numbers: np.ndarray, out: np.ndarray) -> None:
    blocks, raw = numbers.reshape(-1, NUMBERS), out.reshape(-1, self.block)
    most = np.float32(self._most)
    scale = np.abs(blocks).max(1, keepdims=True) / most
    whole = np.clip(np.rint(blocks / _safe(scale)), -most, most) + most
    raw[:, : self._data] = _pack(whole.astype(np.uint8), self._bits)
    _put_scale(raw[:, self._data :], scale)

  def decode(self, raw: np.ndarray) -> np.ndarray:
    rows = raw.reshape(-1, self.block)
    whole = _unpack(rows[:, : self._data], self._bits).astype(np.float32)
    whole -= np.float32(self._most)
    whole *= _scale(rows[:, self._data :])
    return whole.reshape(-1)


class TopK(_Blocks):
  """The largest 3 % of a block, as positions and values of 2 bits.

  No value of 2 bits is zero, so the place of a zero, such as padding, is taken by
  the largest number, which is then stored several times.

  For each position the low 5 bits are stored, and the increase of the rest from
  one to the next, in unary.

  Source: Sarfi et al. 2025, SparseLoCo; Elias 1974 and Fano 1971 for positions.
  """

  _kept = 121
  _width = 5
  _low = -(-_kept * _width // 8)
  _marks = _kept + (NUMBERS - 1 >> _width) + 1
  _high = -(-_marks // 8)
  _values = -(-_kept * 2 // 8)
  block = 144

  def encode(self, numbers: np.ndarray, out: np.ndarray) -> None:
    blocks, raw = numbers.reshape(-1, NUMBERS), out.reshape(-1, self.block)
    kept, width = self._kept, self._width
    found = np.argpartition(np.abs(blocks), -kept, axis=1)[:, -kept:]
    largest = np.abs(blocks).argmax(1)[:, None]
    found = np.where(np.take_along_axis(blocks, found, 1), found, largest)
    found.sort(axis=1)
    values = np.take_along_axis(blocks, found, 1)
    scale = np.abs(values).max(1, keepdims=True)
    codes = np.rint((values / _safe(scale) + 1) * np.float32(1.5))
    marks = np.zeros((len(blocks), self._marks), np.uint8)
    np.put_along_axis(marks, (found >> width) + np.arange(kept), 1, 1)
    low = (found & ((1 << width) - 1)).astype(np.uint8)
    bits = np.unpackbits(low[..., None], axis=2, count=width, bitorder="little")
    raw[:] = 0
    raw[:, : self._low] = np.packbits(bits.reshape(len(low), -1), axis=1)
    raw[:, self._low : self._low + self._high] = np.packbits(marks, axis=1)
    two = np.zeros((len(blocks), self._values * 4), np.uint8)
    two[:, :kept] = np.clip(codes, 0, 3)
    at = self._low + self._high
    raw[:, at : at + self._values] = _pack(two, 2)
    _put_scale(raw[:, -4:], scale)

  def decode(self, raw: np.ndarray) -> np.ndarray:
    rows = raw.reshape(-1, self.block)
    kept, width = self._kept, self._width
    bits = np.unpackbits(rows[:, : self._low], axis=1, count=kept * width)
    low = np.packbits(
      bits.reshape(len(rows), kept, width), axis=2, bitorder="little"
    )[..., 0]
    marks = np.unpackbits(
      rows[:, self._low : self._low + self._high], axis=1, count=self._marks
    )
    high = np.nonzero(marks)[1].reshape(-1, kept) - np.arange(kept)
    at = self._low + self._high
    codes = _unpack(rows[:, at : at + self._values], 2)[:, :kept]
    values = codes.astype(np.float32) * np.float32(2 / 3) - np.float32(1)
    values *= _scale(rows[:, -4:])
    out = np.zeros((len(rows), NUMBERS), np.float32)
    np.put_along_axis(out, (high << width) + low, values, 1)
    return out.reshape(-1)


def _safe(scale: np.ndarray) -> np.ndarray:
  """Scales to divide by, also for a block of zeros, or of tiny numbers."""
  return np.where(scale > np.finfo(np.float32).tiny, scale, np.float32(1))


def _put_scale(head: np.ndarray, scale: np.ndarray) -> None:
  head[:] = 0
  head[:, :4] = np.ascontiguousarray(scale, np.float32).view(np.uint8)


def _scale(head: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(head[:, :4]).view(np.float32)


def _pack(codes: np.ndarray, bits: int) -> np.ndarray:
  """Packs codes of a row into bytes, the first one lowest."""
  each = 8 // bits
  out = codes[:, ::each].copy()
  for i in range(1, each):
    out |= codes[:, i::each] << (i * bits)
  return out


def _unpack(data: np.ndarray, bits: int) -> np.ndarray:
  each = 8 // bits
  out = np.empty((len(data), data.shape[1] * each), np.uint8)
  for i in range(each):
    out[:, i::each] = (data >> (i * bits)) & ((1 << bits) - 1)
  return out
