"""Majority vote on signs: one bit for each number."""

import jax
import jax.numpy as jnp

from optax_dist._internal import collectives
from optax_dist.compression import _bits, _codec
from optax_dist.compression._gathered import (
  as_given,
  messages,
  owed,
  residuals_like,
  taking_part,
)
from optax_dist.compression.interface import Compression, CompressionState


def sign(*, error_feedback: float | None = None) -> Compression:
  """Sends only signs; each number of the result is the majority vote.

  Without error feedback the result is -1, 1, or 0 if the vote is a tie, as in
  signSGD with majority vote: the step size depends only on the learning rate. A
  number that is zero votes for 1, and one that is NaN for -1: a replica that is
  not finite can't make the result NaN.

  With error feedback a leaf's mean magnitude is sent along with its signs. The
  result is the vote times the mean of these magnitudes, and a replica keeps for
  its next update the difference between its update and its own signs times its
  own mean magnitude.

  Args:
    error_feedback: the decay of this residual (0 to 1); None for no error
      feedback.

  Returns:
    A :class:`Compression`, for ``compression=`` of
    :func:`optax_dist.cross_shard`. ``compression.quantize(1)`` averages scaled
    signs instead.

  Raises:
    ValueError: if an argument is invalid.

  Example:
    >>> import jax, jax.numpy as jnp, optax_dist
    >>> tx = optax_dist.cross_shard(
    ...   "data", compression=optax_dist.compression.sign(), num_replicas=3
    ... )
    >>> state = tx.init(jnp.zeros(2))
    >>> axes = optax_dist.states.state_axes(state)
    >>> vote = jax.vmap(
    ...   tx.update, axis_name="data", in_axes=(0, axes), out_axes=(0, axes)
    ... )
    >>> gradients = jnp.array([[9.0, -0.1], [-1.0, -0.2], [-2.0, 5.0]])
    >>> vote(gradients, state)[0][0]
    Array([-1., -1.], dtype=float32)

  References:
    Bernstein et al. 2018, `signSGD with Majority Vote
    <https://arxiv.org/abs/1802.04434>`_; Karimireddy et al. 2019, `Error Feedback
    Fixes SignSGD <https://arxiv.org/abs/1901.09847>`_.
  """
  _codec.check_error_feedback(error_feedback)
  scaled = error_feedback is not None

  def size(n):
    return _bits.packed_size(n, 1) + 4 * scaled

  def scale_of(x):
    return jnp.sum(jnp.abs(x)) / max(1, x.size)

  def encode(x):
    data = _bits.bits_to_bytes(x >= 0)
    if scaled:
      data = jnp.concatenate([data, _bits.floats_to_bytes(scale_of(x)[None])])
    return data

  def signs_of(data, n):
    bits = _bits.bytes_to_bits(data[: _bits.packed_size(n, 1)])[:n]
    return bits.astype(jnp.int32) * 2 - 1

  def init(updates):
    return CompressionState(
      residuals_like(updates, error_feedback), None, jnp.zeros([], jnp.int32)
    )

  def reduce(updates, state, names):
    there, leaves = taking_part("sign", updates, state.residual, error_feedback)
    out = list(leaves)
    for at in messages(leaves, names):
      message = [encode(leaves[i].reshape(-1)) for i in at]
      everyones = collectives.gather_replicas(jnp.concatenate(message), names)
      start = 0
      for i in at:
        x = leaves[i]
        part = everyones[:, start : start + size(x.size)]
        votes = jax.vmap(lambda row, n=x.size: signs_of(row, n))(part)
        result = jnp.sign(jnp.sum(votes, 0)).astype(jnp.float32)
        if scaled:
          result *= jnp.mean(_bits.bytes_to_floats(part[:, -4:]))
        out[i] = result.reshape(x.shape)
        start += size(x.size)
    residual = state.residual
    if scaled:
      left = [
        owed(x, scale_of(x) * jnp.where(x >= 0, 1.0, -1.0)) for x in leaves
      ]
      residual = there.put(residual, left)
    new = as_given(there, updates, out)
    return new, CompressionState(residual, None, state.num_updates + 1)

  def sent(updates):
    return sum(size(leaf.size) for leaf in jax.tree.leaves(updates))

  def round_trip(x):
    signs = jnp.where(x >= 0, 1.0, -1.0)
    return signs * scale_of(x) if scaled else signs

  return Compression("sign", init, reduce, sent, round_trip, error_feedback)
