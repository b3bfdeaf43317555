"""Majority vote on signs: 1.6 bits for each number."""

import jax
import jax.numpy as jnp

from optax_dist.compression import _bits, _codec
from optax_dist.compression._gathered import gathered
from optax_dist.compression.interface import Compression


def sign(*, error_feedback: float | None = None) -> Compression:
  """Sends only signs; each number of the result is the majority vote.

  Without error feedback the result is -1, 1, or 0 if the vote is a tie, as in
  signSGD with majority vote: the step size depends only on the learning rate. A
  number that is zero or NaN does not vote: what no replica wants to move stays, and
  a replica that is not finite can't make the result NaN. For the three signs five
  numbers share a byte.

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

  def encode(x, key):
    del key
    data = _bits.pack_signs(x)
    if scaled:
      scale = _codec.mean_along(jnp.abs(x), 0, x.size)
      data = jnp.concatenate([data, _bits.floats_to_bytes(scale[None])])
    return data

  def signs_of(data, n):
    return _bits.unpack_signs(data[:-4] if scaled else data, n)

  def decode(data, n):
    signs = signs_of(data, n).astype(jnp.float32)
    return signs * _bits.bytes_to_floats(data[-4:]) if scaled else signs

  def vote(codes, sizes):
    return [vote_of_leaf(rows, n) for rows, n in zip(codes, sizes, strict=True)]

  def vote_of_leaf(rows, n):
    votes = jax.vmap(lambda data: signs_of(data, n))(rows)
    result = jnp.sign(jnp.sum(votes, 0)).astype(jnp.float32)
    if scaled and n:
      scales = _bits.bytes_to_floats(rows[:, -4:])
      result *= _codec.mean_along(scales, 0, len(rows))
    return result

  return gathered("sign", encode, decode, error_feedback, combine=vote)
