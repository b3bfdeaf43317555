"""bfloat16 in one pass over memory, by XLA, where NumPy would need ten.

Bit-identical to `wire_formats.BFloat16`, which is used for remainders, so that
only one shape has to be compiled.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_dist.tensorflow1 import accumulator

# Numbers that are averaged at once; a multiple of the wires' quanta.
PIECE = 64 * 64 * 252


@jax.jit
def _shorten(x: jax.Array) -> jax.Array:
  return jax.lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16)


def shorten(leaf: Any) -> tuple[np.ndarray, bool]:
  """The upper halves of float32 numbers (uint16), and whether all are finite.

  Example:
    >>> bits, finite = shorten(jnp.array([1.0, -2.0]))
    >>> [hex(b) for b in bits], finite
    (['0x3f80', '0xc000'], True)
  """
  bits = np.asarray(_shorten(leaf)).reshape(-1)
  # Infinities and NaN have all exponent bits set. XLA's reductions take several
  # times as long as this.
  return bits, not bits.size or int((bits & 0x7FFF).max()) < 0x7F80


@jax.jit
def _mean(parts: Sequence[jax.Array], count: jax.Array) -> jax.Array:
  widen = lambda x: jax.lax.bitcast_convert_type(
    x.astype(jnp.uint32) << jnp.uint32(16), jnp.float32
  )
  total = widen(parts[0])
  for part in parts[1:]:
    total = total + widen(part)
  return _shorten(accumulator.divided(total, count))


def mean(parts: Sequence[np.ndarray], count: int, out: np.ndarray) -> None:
  """Averages pieces of `PIECE` numbers (uint16), in order, into `out`."""
  found = _mean(tuple(parts), np.float32(count))
  np.copyto(out, np.asarray(found))
