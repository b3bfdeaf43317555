"""Quantization: few bits for each number, with one scale per block."""

from typing import Literal

import jax
import jax.numpy as jnp

from optax_dist._internal import checks
from optax_dist.compression import _bits, _codec
from optax_dist.compression._gathered import gathered
from optax_dist.compression.interface import Compression


def quantize(
  bits: Literal[8, 4, 2, 1],
  *,
  block: int = 256,
  stochastic: bool = False,
  error_feedback: float | None = 1.0,
  seed: int = 0,
) -> Compression:
  """Sends numbers as whole multiples of a step, in ``bits`` bits each.

  With s the largest magnitude in a block and ``m = 2**(bits - 1) - 1``, a
  number x is sent as the integer nearest to ``m * x / s``; zeros stay zeros.
  With one bit, its sign is sent, and s is the mean magnitude of the block; there is
  no zero then, and a zero gets a random sign, unless its whole block is zero. A
  number that is not finite makes its block NaN.

  ``stochastic=True`` rounds up or down at random, so that the result is
  unbiased (and with one bit s is the largest magnitude); the error is larger,
  and error feedback is not needed for convergence.

  Args:
    bits: bits of each number: 8, 4, 2 or 1.
    block: how many numbers share a 32-bit scale; a positive integer.
    stochastic: whether to round at random.
    error_feedback: decay (0 to 1) of what each replica could not send, which it
      adds to its next update; None for no error feedback.
    seed: seed of the rounding.

  Returns:
    A :class:`Compression`, for ``compression=`` of
    :func:`optax_dist.cross_shard`.

  Raises:
    ValueError: if an argument is invalid.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from optax_dist import compression
    >>> method = compression.quantize(2)
    >>> mean = lambda x: method.reduce(x, method.init(x), ("data",))[0]
    >>> jax.vmap(mean, axis_name="data")(jnp.array([[0.9, -0.2, 0.0, -1.0]])).tolist()
    [[1.0, 0.0, 0.0, -1.0]]

  References:
    Alistarh et al. 2017, `QSGD <https://arxiv.org/abs/1610.02132>`_; Seide et al.
    2014, 1-Bit Stochastic Gradient Descent; Karimireddy et al. 2019, `Error
    Feedback Fixes SignSGD <https://arxiv.org/abs/1901.09847>`_.
  """
  bits = checks.one_of_numbers("bits", bits, (8, 4, 2, 1))
  checks.flag("stochastic", stochastic)
  block = checks.count("block", block)
  seed = _codec.check_seed(seed)
  _codec.check_error_feedback(error_feedback)
  most = max(1, 2 ** (bits - 1) - 1)

  def length(n):
    return min(block, n)

  def encode(x, key):
    rows = _codec.rows_of(x, length(x.size))
    magnitude = jnp.abs(rows)
    if bits == 1 and not stochastic:
      # Padding must not reduce the mean.
      here = _codec.rows_of(jnp.ones_like(x), rows.shape[1])
      smaller, _ = _codec.mean_factors(rows.shape[1])
      counts = jnp.sum(here * smaller, -1)
      scales = jnp.sum(magnitude * smaller, -1) / counts
    else:
      scales = jnp.max(magnitude, -1)
    levels, scales = _codec.by_scale(rows, scales[:, None])
    levels *= most
    is_random = stochastic or bits == 1
    noise = (
      jax.random.uniform(key, rows.shape, rows.dtype) if is_random else 0.5
    )
    if bits == 1:
      # The levels are -1 and 1: the probability of rounding up grows linearly
      # from one to the other. A zero must not drift if it is not fed back.
      target = levels if stochastic else jnp.sign(levels)
      codes = (noise * 2 - 1 < target).astype(jnp.uint8)
    else:
      whole = jnp.clip(jnp.floor(levels + noise), -most, most)
      codes = (whole + most).astype(jnp.uint8)
    data = _bits.pack(codes, bits)
    return jnp.concatenate([data, _bits.floats_to_bytes(scales)], -1)

  def decode(data, n):
    width = _bits.packed_size(length(n), bits)
    data = data.reshape(-1, width + 4)
    codes = _bits.unpack(data[:, :width], bits, length(n)).astype(jnp.float32)
    whole = codes * 2 - 1 if bits == 1 else codes - most
    scales = _bits.bytes_to_floats(data[:, width:])
    # Clipped, since rounding could exceed the scale, which may be the largest number.
    levels = jnp.clip(whole / most, -1, 1)
    return (levels * scales).reshape(-1)[:n]

  return gathered("quantize", encode, decode, error_feedback, seed)
