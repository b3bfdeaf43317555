"""Packs small integers into bytes: fixed widths, and increasing positions.

Each function is a jitted program, like those of ``jax.numpy``: outside of ``jax.jit``,
each of its some twenty operations would be compiled on its own.
"""

import functools

import jax
import jax.numpy as jnp


def _count_along_last(like: jax.Array, size: int) -> jax.Array:
  """Returns 0, 1, ... along the last axis, to broadcast against ``like``."""
  shape = (1,) * (like.ndim - 1) + (size,)
  return jax.lax.broadcasted_iota(like.dtype, shape, like.ndim - 1)


def packed_size(count: int, width: int) -> int:
  """Returns the bytes that ``count`` numbers of ``width`` bits take.

  Example:
    >>> packed_size(5, 3)
    2
  """
  return -(-count * width // 8)


@functools.partial(jax.jit, static_argnames="width")
def pack(codes: jax.Array, width: int) -> jax.Array:
  """Packs numbers of ``width`` bits each, without gaps between them.

  Args:
    codes: integers from 0 to ``2**width - 1``, of shape (..., n).
    width: bits of each number, from 1 to 32.

  Returns:
    uint8, of shape (..., :func:`packed_size`).

  Example:
    >>> pack(jnp.array([1, 2, 3, 0, 3]), 2).tolist()
    [57, 3]
  """
  codes = codes.astype(jnp.uint32)
  bits = codes[..., None]
  bits = (bits >> _count_along_last(bits, width)) & jnp.uint32(1)
  bits = bits.astype(jnp.uint8).reshape(*codes.shape[:-1], -1)
  return jnp.packbits(bits, -1, "little")


@functools.partial(jax.jit, static_argnames=("width", "count"))
def unpack(data: jax.Array, width: int, count: int) -> jax.Array:
  """Undoes :func:`pack`.

  Args:
    data: uint8, of shape (..., bytes).
    width: bits of each number.
    count: the number of numbers.

  Returns:
    uint32, of shape (..., count).

  Example:
    >>> unpack(jnp.array([57, 3], jnp.uint8), 2, 5).tolist()
    [1, 2, 3, 0, 3]
  """
  bits = jnp.unpackbits(data, -1, count * width, "little")
  bits = bits.reshape(*data.shape[:-1], count, width).astype(jnp.uint32)
  bits = bits << _count_along_last(bits, width)
  return jnp.sum(bits, axis=-1, dtype=jnp.uint32)


@jax.jit
def pack_signs(x: jax.Array) -> jax.Array:
  """Packs the signs of numbers, five of them in a byte.

  Args:
    x: floating-point numbers, of shape (n,). NaN has the sign 0.

  Returns:
    uint8, of shape (ceil(n / 5),).

  Example:
    >>> pack_signs(jnp.array([0.5, 0.0, -2.0, 3.0])).tolist()
    [59]
  """
  signs = (x > 0).astype(jnp.uint8) + (x >= 0).astype(jnp.uint8)
  signs = jnp.where(jnp.isnan(x), jnp.uint8(1), signs)
  rows = jnp.pad(signs, (0, -x.size % 5)).reshape(-1, 5)
  return jnp.sum(rows * _powers_of_3(), axis=-1, dtype=jnp.uint8)


@functools.partial(jax.jit, static_argnames="count")
def unpack_signs(data: jax.Array, count: int) -> jax.Array:
  """Undoes :func:`pack_signs`.

  Args:
    data: uint8, of shape (bytes,).
    count: the number of signs.

  Returns:
    int32, of shape (count,): -1, 0 or 1.

  Example:
    >>> unpack_signs(jnp.array([59], jnp.uint8), 4).tolist()
    [1, 0, -1, 1]
  """
  digits = data[:, None] // _powers_of_3() % jnp.uint8(3)
  return digits.reshape(-1)[:count].astype(jnp.int32) - 1


def _powers_of_3() -> jax.Array:
  return jnp.array([[1, 3, 9, 27, 81]], jnp.uint8)


def _low_width(count: int, bound: int) -> int:
  return max(0, (bound // count).bit_length() - 1)


def positions_size(count: int, bound: int) -> int:
  """Returns the bytes that :func:`pack_positions` needs.

  Example:
    128 of 4,096 positions: 7 bits each, where a single position needs 12.

    >>> positions_size(128, 4096) * 8 / 128
    7.0
  """
  low = _low_width(count, bound)
  high = count + ((bound - 1) >> low) + 1
  return packed_size(count, low) + packed_size(high, 1)


@functools.partial(jax.jit, static_argnames="bound")
def pack_positions(positions: jax.Array, bound: int) -> jax.Array:
  """Packs increasing positions in about ``log2(bound / n) + 2`` bits each.

  The low bits of each position are stored directly; the high bits as
  differences between consecutive positions, in unary.

  Args:
    positions: integers below ``bound``, strictly increasing along the last
      axis, of shape (..., n).
    bound: see ``positions``.

  Returns:
    uint8, of shape (..., :func:`positions_size`).

  References:
    Elias 1974, Efficient Storage and Retrieval by Content and Address of Static
    Files; Fano 1971.
  """
  count = positions.shape[-1]
  width = _low_width(count, bound)
  positions = positions.astype(jnp.uint32)
  marks = (positions >> width) + _count_along_last(positions, count)
  size = count + ((bound - 1) >> width) + 1
  rows = marks.reshape(-1, count)
  bits = jnp.zeros((rows.shape[0], size), jnp.uint8)
  bits = jax.vmap(lambda row, at: row.at[at].set(jnp.uint8(1)))(bits, rows)
  bits = bits.reshape(*positions.shape[:-1], size)
  high = jnp.packbits(bits, -1, "little")
  if not width:
    return high
  low = pack(positions & jnp.uint32((1 << width) - 1), width)
  return jnp.concatenate([low, high], axis=-1)


@functools.partial(jax.jit, static_argnames=("count", "bound"))
def unpack_positions(data: jax.Array, count: int, bound: int) -> jax.Array:
  """Undoes :func:`pack_positions`.

  Args:
    data: uint8, of shape (..., bytes).
    count: the number of positions.
    bound: see :func:`pack_positions`.

  Returns:
    int32, of shape (..., count).
  """
  width = _low_width(count, bound)
  split = packed_size(count, width)
  size = count + ((bound - 1) >> width) + 1
  bits = jnp.unpackbits(data[..., split:], -1, size, "little")
  rows = bits.reshape(-1, size)
  find = lambda row: jnp.nonzero(row, size=count, fill_value=size - 1)[0]
  marks = jax.vmap(find)(rows).reshape(*data.shape[:-1], count)
  positions = (marks - _count_along_last(marks, count)) << width
  positions = positions.astype(jnp.int32)
  if width:
    low = unpack(data[..., :split], width, count)
    positions |= low.astype(jnp.int32)
  return positions


@jax.jit
def floats_to_bytes(x: jax.Array) -> jax.Array:
  """Returns float32 numbers of shape (..., n) as uint8 of shape (..., 4 * n)."""
  data = jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.uint8)
  return data.reshape(*x.shape[:-1], -1)


@jax.jit
def bytes_to_floats(data: jax.Array) -> jax.Array:
  """Undoes :func:`floats_to_bytes`."""
  data = data.reshape(*data.shape[:-1], -1, 4)
  return jax.lax.bitcast_convert_type(data, jnp.float32)
