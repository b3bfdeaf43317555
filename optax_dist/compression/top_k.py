"""Sparsification: sends only the largest numbers of each chunk."""

from typing import Literal

import jax
import jax.numpy as jnp

from optax_dist._internal import checks
from optax_dist.compression import _bits, _codec
from optax_dist.compression._gathered import gathered
from optax_dist.compression.interface import Compression


def top_k(
  density: float,
  *,
  chunk: int = 4096,
  bits: Literal[32, 8, 4, 2] = 32,
  error_feedback: float | None = 1.0,
) -> Compression:
  """Sends a fraction of the numbers: the largest ones in each chunk.

  A chunk is a run of ``chunk`` numbers of a leaf; smaller leaves are one chunk.
  In each chunk the ``density * chunk`` numbers (at least one) with the largest
  magnitudes are kept. Their positions take about ``log2(1 / density) + 2`` bits
  each, and their values ``bits``: below 32, a value is rounded to the nearest
  of ``2**bits`` evenly spaced levels between minus and plus the chunk's largest
  magnitude, or of one level less, with zero among them, if there are zeros among
  the values. If that magnitude is not finite, all that is sent of the chunk is NaN.

  SparseLoCo is ``diloco`` without outer momentum and with
  ``compression=top_k(0.03, bits=2, error_feedback=0.95)``.

  Args:
    density: the fraction to keep, above 0 and at most 1.
    chunk: numbers in a chunk; a positive integer.
    bits: bits of each value: 32, 8, 4 or 2.
    error_feedback: decay (0 to 1) of what each replica did not send, which it
      adds to its next update; None for no error feedback.

  Returns:
    A :class:`Compression`, for ``compression=`` of
    :func:`optax_dist.cross_shard`.

  Raises:
    ValueError: if an argument is invalid.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from optax_dist import compression
    >>> method = compression.top_k(0.5)
    >>> mean = lambda x: method.reduce(x, method.init(x), ("data",))[0]
    >>> jax.vmap(mean, axis_name="data")(jnp.array([[0.1, -3.0, 2.0, 0.5]])).tolist()
    [[0.0, -3.0, 2.0, 0.0]]

  References:
    Sarfi et al. 2025, `Communication Efficient LLM Pre-training with SparseLoCo
    <https://arxiv.org/abs/2508.15706>`_; Stich et al. 2018, `Sparsified SGD with
    Memory <https://arxiv.org/abs/1809.07599>`_.
  """
  checks.fraction("density", density)
  if not density:
    raise ValueError("`density` must be above 0, got 0.")
  chunk = checks.count("chunk", chunk)
  bits = checks.one_of_numbers("bits", bits, (32, 8, 4, 2))
  _codec.check_error_feedback(error_feedback)
  most = 2**bits - 1

  def length_and_kept(n):
    length = min(chunk, n)
    return length, max(1, round(density * length))

  def encode(x, key):
    del key
    length, kept = length_and_kept(x.size)
    rows = _codec.rows_of(x, length)
    _, positions = jax.lax.top_k(jnp.abs(rows), kept)
    positions = jnp.sort(positions, -1)
    values = jnp.take_along_axis(rows, positions, -1)
    where = _bits.pack_positions(positions, length)
    if bits == 32:
      return jnp.concatenate([where, _bits.floats_to_bytes(values)], -1)
    scales = jnp.max(jnp.abs(values), -1, keepdims=True)
    quotients, scales = _codec.by_scale(values, scales)
    # The sign of a scale says which levels it is for.
    has_zero = jnp.any(values == 0, -1, keepdims=True)
    last = jnp.where(has_zero, most - 1.0, most)
    scales = jnp.where(has_zero, -scales, scales)
    levels = jnp.round((quotients + 1) * 0.5 * last)
    codes = jnp.clip(levels, 0, last).astype(jnp.uint8)
    parts = [where, _bits.pack(codes, bits), _bits.floats_to_bytes(scales)]
    return jnp.concatenate(parts, -1)

  def decode(data, n):
    length, kept = length_and_kept(n)
    data = data.reshape(-(-n // length), -1)
    split = _bits.positions_size(kept, length)
    positions = _bits.unpack_positions(data[:, :split], kept, length)
    if bits == 32:
      values = _bits.bytes_to_floats(data[:, split:])
    else:
      codes = _bits.unpack(data[:, split:-4], bits, kept).astype(jnp.float32)
      scales = _bits.bytes_to_floats(data[:, -4:])
      last = jnp.where(jnp.signbit(scales), most - 1.0, most)
      # Clipped, since rounding could exceed the scale, which may be the largest number.
      levels = jnp.clip((codes * 2 - last) / last, -1, 1)
      values = levels * jnp.abs(scales)
    rows = jnp.zeros((data.shape[0], length), jnp.float32)
    put = lambda row, at, value: row.at[at].set(value)
    return jax.vmap(put)(rows, positions, values).reshape(-1)[:n]

  return gathered("top_k", encode, decode, error_feedback)
