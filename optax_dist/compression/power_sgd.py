"""Low-rank approximation of matrices by one step of power iteration."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import axes, checks, collectives
from optax_dist._internal.leaves import update_leaves
from optax_dist._internal.placement.replica_blocks import PerShard
from optax_dist._internal.replica_params import Leaves
from optax_dist.compression import _codec
from optax_dist.compression._gathered import (
  like_updates,
  not_sent,
  residuals_like,
  taking_part,
)
from optax_dist.compression.interface import Compression, CompressionState


def power_sgd(
  rank: int, *, error_feedback: float | None = 1.0, seed: int = 0
) -> Compression:
  """Sends an m by n matrix as ``rank * (m + n)`` numbers.

  With M the mean of the replicas' matrices and Q the factor of the previous
  update, ``P = orthogonal(M Q)`` and ``Q' = Mᵀ P``; the result is ``P Q'ᵀ``.
  Both products are means of the replicas' products, so they are all-reduced,
  and M is never sent. A matrix of at most this rank is reproduced exactly.

  A leaf with more than two axes is treated as a matrix of its first axis by the
  others. Vectors, and matrices for which this would save nothing, are sent
  whole.

  Of a parameter that is sharded over model axes, each shard is a matrix of its
  own, with its own factors: call ``init`` inside of the map.

  Args:
    rank: rank of the factors; a positive integer.
    error_feedback: decay (0 to 1) of the part of its own matrix that a replica
      could not send, which it adds to its next update; None for no error
      feedback.
    seed: seed of the initial factors.

  Returns:
    A :class:`Compression`, for ``compression=`` of
    :func:`optax_dist.cross_shard`.

  Raises:
    ValueError: if an argument is invalid; in an update, if the state has
      factors of another shape.

  Example:
    >>> import jax, jax.numpy as jnp
    >>> from optax_dist import compression
    >>> method = compression.power_sgd(1)
    >>> mean = lambda x: method.reduce(x, method.init(x), ("data",))[0]
    >>> x = jnp.outer(jnp.arange(1.0, 5.0), jnp.arange(1.0, 7.0))
    >>> received = jax.vmap(mean, axis_name="data")(x[None])[0]
    >>> bool(jnp.allclose(received, x, atol=1e-5))
    True
    >>> method.sent(x) / x.nbytes < 0.5
    True

  References:
    Vogels, Karimireddy and Jaggi 2019, `PowerSGD
    <https://arxiv.org/abs/1905.13727>`_.
  """
  rank = checks.count("rank", rank)
  seed = _codec.check_seed(seed)
  _codec.check_error_feedback(error_feedback)

  def init(updates):
    treedef: Any
    leaves, treedef = jax.tree.flatten(updates, is_leaf=lambda x: x is None)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    # Each factor is in the place of its leaf, since a gradient may be None later.
    factors = treedef.unflatten(
      [_first_factor(x, rank, key) for x, key in zip(leaves, keys, strict=True)]
    )
    return CompressionState(
      residuals_like(updates, error_feedback), factors, jnp.zeros([], jnp.int32)
    )

  def reduce(updates, state, names):
    there, wanted, leaves = taking_part(
      "power_sgd", updates, state.residual, error_feedback
    )
    starts = _starts(updates, there, state.shared, rank)
    thin = [i for i, start in enumerate(starts) if start is not None]
    whole = [i for i, start in enumerate(starts) if start is None]
    befores = [starts[i] for i in thin]
    means, sent, factors, of_whole = _means(
      [leaves[i].reshape(_sides(leaves[i], rank)) for i in thin],
      befores,
      [leaves[i] for i in whole],
      names,
    )
    results = list(leaves)
    kept = [jnp.zeros_like(leaf) for leaf in leaves]
    for i, x in zip(whole, of_whole, strict=True):
      results[i] = x
    shared = there.of(state.shared)
    for i, x, own, q, start in zip(
      thin, means, sent, factors, befores, strict=True
    ):
      results[i] = x.reshape(leaves[i].shape)
      kept[i] = not_sent(wanted[i], own.reshape(leaves[i].shape))
      shared[i] = PerShard(_next_start(q, start))
    residual = state.residual
    if error_feedback is not None:
      residual = there.put(residual, kept)
    return like_updates(there, updates, results), CompressionState(
      residual, there.put(state.shared, shared), state.num_updates + 1
    )

  def sent(updates):
    count = 0
    for leaf in jax.tree.leaves(updates):
      shape = _sides(leaf, rank)
      count += rank * sum(shape) if shape else leaf.size
    return 4 * count

  return Compression(
    "power_sgd", init, reduce, sent, error_feedback, is_mean=False
  )


def _sides(leaf: Any, rank: int) -> tuple[int, int] | None:
  """The sides of the matrix for a leaf; None for one that is sent whole."""
  shape = jnp.shape(leaf)
  if len(shape) < 2 or 0 in shape:
    return None
  m, n = shape[0], math.prod(shape[1:])
  return (m, n) if rank * (m + n) < m * n and rank < min(m, n) else None


def _first_factor(leaf: Any, rank: int, key: jax.Array) -> PerShard | None:
  """The first factor of a leaf; None for a vector."""
  if leaf is None or jnp.ndim(leaf) < 2:
    return None
  # Whether the state has a factor must not depend on how a leaf is sharded.
  sides = _sides(leaf, rank)
  if not sides:
    return PerShard(jnp.zeros([1, 1], jnp.float32))
  return PerShard(jax.random.normal(key, (sides[1], rank), jnp.float32))


def _starts(updates: Any, there: Leaves, shared: Any, rank: int) -> list[Any]:
  """The factors of the leaves, checked; None for those sent whole."""
  paths_and_leaves, _ = jax.tree_util.tree_flatten_with_path(
    updates, is_leaf=lambda x: x is None
  )
  starts = []
  for i, start in zip(there.at, there.of(shared), strict=True):
    path, leaf = paths_and_leaves[i]
    sides = _sides(leaf, rank)
    starts.append(start.value if sides else None)
    if sides and start.value.shape != (sides[1], rank):
      raise ValueError(
        f"compression.power_sgd: {update_leaves.name_of(path)} has shape"
        f" {jnp.shape(leaf)}, but its factor in the state has"
        f" {start.value.shape}, and must have {(sides[1], rank)}. If parameters"
        " are sharded over model axes, call `init` inside of the map, where it"
        " sees one shard of each."
      )
  return starts


def _means(
  matrices: list[jax.Array],
  starts: list[jax.Array],
  whole: list[jax.Array],
  names: tuple[axes.AxisName, ...],
) -> tuple[list[jax.Array], ...]:
  """Averages matrices, approximately, and other leaves.

  Returns:
    The means of the matrices; what this replica has sent of its own; the factors of
    the means; and the means of the other leaves.
  """
  smaller, divisor = _codec.mean_factors(jax.lax.axis_size(names))

  def mean(values):
    values = [x * smaller for x in values]
    totals = collectives.sum_leaves(values, [names] * len(values))
    return [total / divisor for total in totals]

  # Leaves that are sent whole go with the first of the two messages.
  products = [_not_huge(m) @ q for m, q in zip(matrices, starts, strict=True)]
  first = mean(products + whole)
  bases = [jnp.linalg.qr(p)[0] for p in first[: len(matrices)]]
  # A sum along a column may be larger than each of its numbers.
  shrink = [_codec.mean_factors(p.shape[0])[0] for p in bases]
  own = [(m * s).T @ p for m, p, s in zip(matrices, bases, shrink, strict=True)]
  factors = mean(own) if own else []
  return (
    list(map(_product, bases, factors, shrink)),
    list(map(_product, bases, own, shrink)),
    factors,
    first[len(matrices) :],
  )


def _next_start(factor: jax.Array, before: jax.Array) -> jax.Array:
  """The factor from which the next update starts; only directions matter."""
  largest = jnp.max(jnp.abs(factor), axis=0, keepdims=True)
  # A column of zeros is not used: it would stay zero, whatever the gradients are.
  usable = (largest > 0) & (largest < 2.0**100)
  return jnp.where(usable, factor / jnp.where(usable, largest, 1), before)


def _not_huge(m: jax.Array) -> jax.Array:
  """Returns a matrix whose products are finite; only their directions matter."""
  is_huge = jnp.max(jnp.abs(m)) > 2.0**80
  return m * jnp.where(is_huge, 2.0**-80, 1.0)


def _product(p: jax.Array, q: jax.Array, smaller: float) -> jax.Array:
  """Returns ``p qᵀ / smaller``, as far as float32 has such numbers."""
  most = float(jnp.finfo(jnp.float32).max) * smaller
  return jnp.clip(p @ q.T, -most, most) / smaller
