"""Compression by gathering: each replica averages all encoded updates."""

from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import collectives
from optax_dist._internal.leaves import update_leaves
from optax_dist.compression._codec import Codec
from optax_dist.compression.interface import Compression, CompressionState


def gathered(
  name: str, codec: Codec, error_feedback: float | None, seed: int = 0
) -> Compression:
  """Returns a compression that sends each leaf encoded by ``codec``.

  All leaves of an update are sent in one message. The mean is computed in the
  order of the replicas, so that it is equal on all of them.

  Args:
    name: name of the method.
    codec: codec for one leaf.
    error_feedback: the decay, or None.
    seed: seed of the codec's random keys.
  """

  def encode(x, key):
    return codec.encode(x, key) if x.size else jnp.zeros(0, jnp.uint8)

  def decode(data, n):
    return codec.decode(data, n) if n else jnp.zeros(0, jnp.float32)

  def init(updates):
    return CompressionState(
      residual=residuals_like(updates, error_feedback),
      shared=None,
      num_updates=jnp.zeros([], jnp.int32),
    )

  def reduce(updates, state, names):
    treedef: Any
    paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(updates)
    leaves = []
    for path, leaf in paths_and_leaves:
      leaves.append(as_float32(name, path, leaf))
    leaves = add_residuals(leaves, state.residual, error_feedback)
    key = jax.random.fold_in(jax.random.key(seed), state.num_updates)
    for axis in names:
      key = jax.random.fold_in(key, jax.lax.axis_index(axis))
    keys = jax.random.split(key, max(1, len(leaves)))
    mine = [
      encode(leaf.reshape(-1), key)
      for leaf, key in zip(leaves, keys, strict=False)
    ]
    if not leaves:
      return updates, state._replace(num_updates=state.num_updates + 1)
    message = jnp.concatenate(mine)
    everyones = collectives.gather_replicas(message, names)
    sizes = [leaf.size for leaf in leaves]

    def decode_all(data):
      out, start = [], 0
      for n in sizes:
        out.append(decode(data[start : start + codec.size(n)], n))
        start += codec.size(n)
      return out

    # One replica at a time: the updates are never all decoded at once.
    def add(sums, data):
      return [a + b for a, b in zip(sums, decode_all(data), strict=True)], None

    sums, _ = jax.lax.scan(
      add, [jnp.zeros(n, jnp.float32) for n in sizes], everyones
    )
    count = everyones.shape[0]
    means = [
      (total / count).reshape(leaf.shape).astype(jnp.asarray(given).dtype)
      for total, leaf, (_, given) in zip(
        sums, leaves, paths_and_leaves, strict=True
      )
    ]
    residual = state.residual
    if error_feedback is not None:
      residual = treedef.unflatten(
        leaf - own.reshape(leaf.shape)
        for leaf, own in zip(leaves, decode_all(message), strict=True)
      )
    return treedef.unflatten(means), CompressionState(
      residual, None, state.num_updates + 1
    )

  def sent(updates):
    return sum(codec.size(leaf.size) for leaf in jax.tree.leaves(updates))

  def round_trip(x):
    flat = jnp.asarray(x, jnp.float32).reshape(-1)
    return decode(encode(flat, jax.random.key(seed)), x.size).reshape(x.shape)

  return Compression(name, init, reduce, sent, round_trip, error_feedback)


def residuals_like(updates: Any, error_feedback: float | None) -> Any:
  """Returns zeros for each leaf, or None without error feedback."""
  if error_feedback is None:
    return None
  return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), updates)


def as_float32(name: str, path: Any, leaf: Any) -> jax.Array:
  """Returns a leaf as float32.

  Raises:
    TypeError: if it is not floating-point.
  """
  leaf = jnp.asarray(leaf)
  if not jnp.issubdtype(leaf.dtype, jnp.floating):
    raise TypeError(
      f"compression.{name} sends floating-point updates, but"
      f" {update_leaves.name_of(path)} is {leaf.dtype}. Leave it out (None, or"
      " optax.partition)."
    )
  return leaf.astype(jnp.float32)


def add_residuals(
  leaves: list[jax.Array], residual: Any, error_feedback: float | None
) -> list[jax.Array]:
  """Returns the leaves plus what was not sent before."""
  if error_feedback is None:
    return leaves
  return [
    leaf + error_feedback * left
    for leaf, left in zip(leaves, jax.tree.leaves(residual), strict=True)
  ]
