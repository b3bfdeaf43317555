"""Fragments of the parameters: which one each array is in, and mixing one in."""

from __future__ import annotations

import heapq
from typing import Any

import jax
import jax.numpy as jnp


def mix(own: Any, new: Any, alpha: float) -> Any:
  """Mixes a merged fragment in: ``alpha * own + (1 - alpha) * new``.

  Args:
    own: the learner's fragment.
    new: the merged one, of the same structure.
    alpha: the weight of its own, from 0 to 1.

  Returns:
    The mix, in the dtypes of ``own``.

  Example:
    >>> mix(jnp.array([0.0]), jnp.array([4.0]), 0.25)
    Array([3.], dtype=float32)
  """

  def mixed(x: jax.Array, y: jax.Array) -> jax.Array:
    wide = jnp.asarray(y, jnp.float32)
    result = wide + alpha * (jnp.asarray(x, jnp.float32) - wide)
    return result.astype(jnp.result_type(x))

  return jax.tree.map(mixed, own, new)


def balanced_fragments(params: Any, fragments: int) -> list[list[int]]:
  """Distributes the parameters over fragments of about equal sizes.

  The largest come first, each into the fragment that is the smallest so far.

  Args:
    params: a pytree of arrays.
    fragments: the number of fragments; at most the number of arrays.

  Returns:
    For each fragment, the numbers of its leaves.

  Raises:
    ValueError: if the number is out of range.

  Example:
    >>> sizes = {"a": jnp.zeros(5), "b": jnp.zeros(3), "c": jnp.zeros(2)}
    >>> balanced_fragments(sizes, 2)
    [[0], [1, 2]]
  """
  leaves = jax.tree.leaves(params)
  if fragments > len(leaves):
    raise ValueError(
      f"fragments must be from 1 to {len(leaves)}, the number of arrays, got"
      f" {fragments!r}."
    )
  heap = [(0, i) for i in range(fragments)]
  parts: list[list[int]] = [[] for _ in range(fragments)]
  # Each size counts as one more, so that no fragment stays empty.
  for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
    size, fragment = heapq.heappop(heap)
    parts[fragment].append(i)
    heapq.heappush(heap, (size + leaves[i].size + 1, fragment))
  return [sorted(own) for own in parts]
