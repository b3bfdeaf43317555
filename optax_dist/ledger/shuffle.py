"""A seeded permutation that is computed on demand, without storing it.

A ledger works with *positions*; the samples at them are a permutation,
different in each epoch. All replicas compute it from a seed, at the positions
that they need: no list of N numbers is created, kept or sent.

The permutation is the generalized Feistel cipher of Black and Rogaway (Ciphers
with Arbitrary Finite Domains, CT-RSA 2002), with eight rounds over Z_a x Z_b
and a*b just above N, and their cycle walking for the few numbers beyond N; the
rounds mix by the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
It is for shuffling, not for cryptography.
"""

from __future__ import annotations

import math

import numpy as np

_ROUNDS = 8
_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15


def permuted(
  positions: np.ndarray, size: int, seed: int, epoch: int
) -> np.ndarray:
  """The values of a permutation of `range(size)` at these positions.

  Args:
    positions: positions from 0 to `size` - 1, integers of any shape.
    size: the length of the permutation.
    seed: selects the permutation, together with `epoch`.
    epoch: selects the permutation, together with `seed`.

  Returns:
    int64 numbers of the same shape.

  Example:
    >>> permuted(np.arange(8), 8, seed=0, epoch=0).tolist()
    [7, 1, 6, 4, 0, 2, 5, 3]
    >>> sorted(permuted(np.arange(8), 8, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7]
  """
  a = math.isqrt(size - 1) + 1
  b = -(-size // a)
  keys = _keys(seed, epoch)
  values = np.asarray(positions).astype(np.uint64)
  values = _rounds(values, a, b, keys)
  beyond = values >= size
  while beyond.any():
    values[beyond] = _rounds(values[beyond], a, b, keys)
    beyond = values >= size
  return values.astype(np.int64)


def share(seed: int, position: int) -> float:
  """A number from 0 up to 1 for a position: the same on all replicas.

  Example:
    >>> [round(share(0, position), 3) for position in range(3)]
    [0.05, 0.187, 0.739]
  """
  (key, *_) = _keys(seed, position)
  return key / 2**63


def _rounds(x: np.ndarray, a: int, b: int, keys: list[int]) -> np.ndarray:
  base, other = np.uint64(a), np.uint64(b)
  right: np.ndarray = x // base
  left: np.ndarray = x - right * base
  for number, key in enumerate(keys):
    if number % 2 == 0:
      left = _remainder(left + _mix(right + np.uint64(key)), base)
    else:
      right = _remainder(right + _mix(left + np.uint64(key)), other)
  return right * base + left


def _remainder(x: np.ndarray, divisor: np.uint64) -> np.ndarray:
  """`x % divisor`, in place: NumPy has vector instructions for // only."""
  whole = x // divisor
  whole *= divisor
  x -= whole
  return x


def _mix(x: np.ndarray) -> np.ndarray:
  """Mixes the bits, in place."""
  x ^= x >> np.uint64(30)
  x *= np.uint64(0xBF58476D1CE4E5B9)
  x ^= x >> np.uint64(27)
  x *= np.uint64(0x94D049BB133111EB)
  x ^= x >> np.uint64(31)
  # Only the upper half is added to much smaller numbers, so there is no
  # overflow.
  x >>= np.uint64(32)
  return x


def _keys(seed: int, epoch: int) -> list[int]:
  """A key for each round, from SplitMix64."""
  state, keys = 0, []
  for word in (seed & _MASK, (seed >> 64) & _MASK, epoch):
    state = _next((state ^ word) & _MASK)
  for _ in range(_ROUNDS):
    state = (state + _GOLDEN) & _MASK
    # Leaves room to add a position without overflow.
    keys.append(_next(state) >> 1)
  return keys


def _next(x: int) -> int:
  x = (x + _GOLDEN) & _MASK
  x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
  x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
  return x ^ (x >> 31)
