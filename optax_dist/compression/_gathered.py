"""Compression by gathering: each replica averages all encoded updates."""

import collections
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import axes, collectives
from optax_dist._internal.leaves import update_leaves
from optax_dist._internal.leaves.precision import cast_like
from optax_dist._internal.replica_params import Leaves
from optax_dist.compression import _codec
from optax_dist.compression.interface import Compression, CompressionState


def gathered(
  name: str,
  encode: Callable[[jax.Array, jax.Array], jax.Array],
  decode: Callable[[jax.Array, int], jax.Array],
  error_feedback: float | None,
  seed: int = 0,
  combine: Callable[[list[jax.Array], list[int]], list[jax.Array]]
  | None = None,
) -> Compression:
  """Returns a compression that sends each leaf encoded.

  Leaves are sent in one message, see :func:`messages`. The mean is computed in
  the order of the replicas, so that it is equal on all of them.

  Args:
    name: name of the method.
    encode: takes a leaf, float32 of shape (n,) with n > 0, and a random key;
      returns uint8, of a shape that depends only on n.
    decode: takes these bytes as one row, and n; returns float32 of shape (n,).
    error_feedback: the decay, or None.
    seed: seed of the random keys.
    combine: takes a list with the codes of all replicas for each leaf, uint8 of
      shape (replicas, bytes), and the leaves' sizes; returns what all replicas
      get. None for the mean of what is decoded.
  """

  def encode_leaf(x, key):
    return encode(x, key).reshape(-1) if x.size else jnp.zeros(0, jnp.uint8)

  def decode_leaf(data, n):
    return decode(data, n) if n else jnp.zeros(0, jnp.float32)

  def init(updates):
    residual = residuals_like(updates, error_feedback)
    return CompressionState(residual, None, jnp.zeros([], jnp.int32))

  def reduce(updates, state, names):
    there, wanted, leaves = taking_part(
      name, updates, state.residual, error_feedback
    )
    # A key for each place in the tree, so that it doesn't depend on which gradients are
    # None.
    number = max(1, there.treedef.num_leaves)
    keys = jax.random.split(_own_key(seed, state, names), number)
    mine = [
      encode_leaf(leaf.reshape(-1), keys[i])
      for i, leaf in zip(there.at, leaves, strict=True)
    ]
    means = list(leaves)
    for at in messages(leaves, names):
      sizes = [leaves[i].size for i in at]
      codes = [mine[i] for i in at]
      new = _means_of(codes, sizes, names, decode_leaf, combine)
      for i, mean in zip(at, new, strict=True):
        means[i] = mean.reshape(leaves[i].shape)
    residual = state.residual
    if error_feedback is not None:
      # This replica's own update, as all replicas receive it.
      own = [
        decode_leaf(x, leaf.size).reshape(leaf.shape)
        for x, leaf in zip(mine, leaves, strict=True)
      ]
      residual = there.put(residual, map(not_sent, wanted, own))
    return like_updates(there, updates, means), CompressionState(
      residual, None, state.num_updates + 1
    )

  def sent(updates):
    key = jax.random.key(seed)
    like = lambda n: jax.ShapeDtypeStruct((n,), jnp.float32)
    size = lambda n: jax.eval_shape(encode_leaf, like(n), key).size
    counts = collections.Counter(leaf.size for leaf in jax.tree.leaves(updates))
    return sum(number * size(n) for n, number in counts.items())

  return Compression(
    name, init, reduce, sent, error_feedback, is_mean=combine is None
  )


def _own_key(
  seed: int, state: CompressionState, names: tuple[axes.AxisName, ...]
) -> jax.Array:
  """Returns the random key of this replica's update."""
  key = jax.random.fold_in(jax.random.key(seed), state.num_updates)
  for axis in names:
    key = jax.random.fold_in(key, jax.lax.axis_index(axis))
  return key


def _means_of(
  codes: list[jax.Array],
  sizes: list[int],
  names: tuple[axes.AxisName, ...],
  decode: Callable[[jax.Array, int], jax.Array],
  combine: Callable[[list[jax.Array], list[int]], list[jax.Array]] | None,
) -> list[jax.Array]:
  """Sends the codes of one message, and returns what all replicas get."""
  everyones = collectives.gather_replicas(jnp.concatenate(codes), names)
  ends = list(itertools.accumulate(code.size for code in codes))[:-1]
  if combine is not None:
    return combine(jnp.split(everyones, ends, axis=1), sizes)
  smaller, divisor = _codec.mean_factors(everyones.shape[0])

  # One replica at a time: the updates are never all decoded at once.
  def add(sums, data):
    new = map(decode, jnp.split(data, ends), sizes)
    return [t + x * smaller for t, x in zip(sums, new, strict=True)], None

  zeros = [jnp.zeros(n, jnp.float32) for n in sizes]
  zeros = axes.cast_to_varying(zeros, axes.varying_axes(everyones))
  sums, _ = jax.lax.scan(add, zeros, everyones)
  return [total / divisor for total in sums]


def messages(
  leaves: list[jax.Array], names: tuple[axes.AxisName, ...]
) -> list[list[int]]:
  """Returns the indices of the leaves that are sent in one message.

  All leaves are sent in one message, unless types show that a model's shards are equal
  in some leaves and differ in others: equal leaves must stay equal by type.

  Args:
    leaves: one replica's arrays.
    names: names of the axes over the replicas.
  """
  leaves_by_axes: dict[frozenset[axes.AxisName], list[int]] = {}
  for i, leaf in enumerate(leaves):
    leaves_by_axes.setdefault(axes.varying_axes(leaf) - set(names), []).append(
      i
    )
  return list(leaves_by_axes.values())


def residuals_like(updates: Any, error_feedback: float | None) -> Any:
  """Returns zeros for each leaf, or None without error feedback."""
  if error_feedback is None:
    return None
  return jax.tree.map(lambda x: jnp.zeros_like(x, jnp.float32), updates)


def taking_part(
  name: str, updates: Any, residual: Any, error_feedback: float | None
) -> tuple[Leaves, list[jax.Array], list[jax.Array]]:
  """Returns the leaves that are not None, and the values to send for them.

  Args:
    name: the method, for the message.
    updates: one replica's updates; a leaf of None does not take part.
    residual: the parts that were not sent before, in a tree like the updates.
    error_feedback: the decay of the residual, or None.

  Returns:
    The leaves; a list of these, in float32, with the residuals added; and the same,
    limited to numbers that are not too large for the leaf's dtype.

  Raises:
    TypeError: if a leaf is not floating-point.
  """
  treedef: Any
  paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(
    updates, is_leaf=lambda x: x is None
  )
  at = [i for i, (_, leaf) in enumerate(paths_and_leaves) if leaf is not None]
  there = Leaves(treedef, at)
  leaves = [_as_float32(name, *paths_and_leaves[i]) for i in at]
  if error_feedback is None:
    return there, leaves, leaves
  most = jnp.finfo(jnp.float32).max
  wanted = [
    # Two finite numbers may have an infinite sum.
    jnp.where(jnp.isfinite(x), jnp.clip(x + error_feedback * e, -most, most), x)
    for x, e in zip(leaves, there.of(residual), strict=True)
  ]
  dtypes = [jnp.result_type(paths_and_leaves[i][1]) for i in at]
  return there, wanted, list(map(_codec.within, wanted, dtypes))


def like_updates(there: Leaves, updates: Any, results: list[jax.Array]) -> Any:
  """Returns results in a tree like the updates, in their dtypes."""
  return there.put(
    updates,
    [
      cast_like(_codec.within(x, jnp.result_type(old)), jnp.asarray(old))
      for x, old in zip(results, there.of(updates), strict=True)
    ],
  )


def _as_float32(name: str, path: Any, leaf: Any) -> jax.Array:
  leaf = jnp.asarray(leaf)
  if not jnp.issubdtype(leaf.dtype, jnp.floating):
    raise TypeError(
      f"compression.{name} sends floating-point updates, but"
      f" {update_leaves.name_of(path)} is {leaf.dtype}. Leave it out (None, or"
      " optax.partition)."
    )
  if leaf.dtype == jnp.float64:
    leaf = _codec.within(leaf, jnp.float32)
  return leaf.astype(jnp.float32)


def not_sent(wanted: jax.Array, sent: jax.Array) -> jax.Array:
  """Returns what was not sent of a leaf, for error feedback.

  Numbers that are not finite were sent as such, and are not kept: they would be
  sent again in every later update.
  """
  left = wanted - sent
  return jnp.where(jnp.isfinite(left), left, jnp.zeros_like(left))
