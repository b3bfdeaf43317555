"""A seeded permutation that is computed at any place, and stored nowhere.

A ledger speaks of *positions*; the samples at them are a permutation of each
epoch's own. All replicas compute the same one from a seed, at the places that
they need: no list of N numbers is made, kept or sent.

The permutation is the generalized Feistel cipher of Black and Rogaway (Ciphers
with Arbitrary Finite Domains, CT-RSA 2002), eight rounds over Z_a x Z_b with a*b
just above N, and their cycle walking for the few numbers that fall beyond N; the
rounds mix by the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014).
It is for shuffling, not for secrets.
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
  """The numbers at these places of a permutation of `range(size)`.

  Args:
    positions: places from 0 to `size` - 1, integers of any shape.
    size: how many numbers are permuted.
    seed: with `epoch` it names the permutation.
    epoch: with `seed` it names the permutation.

  Returns:
    int64 numbers of the same shape.

  Example:
    >>> permuted(np.arange(8), 8, seed=0, epoch=0).tolist()
    [7, 1, 6, 4, 0, 2, 5, 3]
    >>> sorted(permuted(np.arange(8), 8, seed=0, epoch=1).tolist())
    [0, 1, 2, 3, 4, 5, 6, 7]
  """
  a = math.isqrt(max(size - 1, 0)) + 1
  b = -(-size // a)
  keys = _keys(seed, epoch)
  found = np.asarray(positions).astype(np.uint64)
  found = _rounds(found, a, b, keys)
  beyond = found >= size
  while beyond.any():
    found[beyond] = _rounds(found[beyond], a, b, keys)
    beyond = found >= size
  return found.astype(np.int64)


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
  """Mixes, in place."""
  x ^= x >> np.uint64(30)
  x *= np.uint64(0xBF58476D1CE4E5B9)
  x ^= x >> np.uint64(27)
  x *= np.uint64(0x94D049BB133111EB)
  x ^= x >> np.uint64(31)
  # The upper half is added to numbers far below it without an overflow.
  x >>= np.uint64(32)
  return x


def _keys(seed: int, epoch: int) -> list[int]:
  """A key for each round, of SplitMix64."""
  state, keys = 0, []
  for word in (seed & _MASK, (seed >> 64) & _MASK, epoch):
    state = _next((state ^ word) & _MASK)
  for _ in range(_ROUNDS):
    state = (state + _GOLDEN) & _MASK
    # Room to add a place without an overflow.
    keys.append(_next(state) >> 1)
  return keys


def _next(x: int) -> int:
  x = (x + _GOLDEN) & _MASK
  x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
  x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
  return x ^ (x >> 31)
