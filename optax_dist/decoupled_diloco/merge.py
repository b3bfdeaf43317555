"""Merges contributions to a fragment into one outer gradient."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp


def merge(
  gradients: Sequence[Any],
  weights: Sequence[float],
  rule: Literal["radial", "mean"] = "radial",
) -> Any:
  """The outer gradient of a fragment, from all contributions to it.

  Args:
    gradients: one pytree per contribution: the fragment's start minus the
      learner's.
    weights: one per contribution; not negative, with a positive sum.
    rule: ``"radial"`` averages norms and directions separately, ``"mean"`` the
      numbers.

  Returns:
    A pytree like each of them, in float32, added in the given order.

  Raises:
    ValueError: if there are none, if the number of weights differs, if weights
      are negative or all zero, or if the rule is unknown.

  Example:
    >>> merge([jnp.array([3.0, 0.0]), jnp.array([0.0, 1.0])], [1.0, 1.0], "mean")
    Array([1.5, 0.5], dtype=float32)
  """
  if rule not in ("radial", "mean"):
    raise ValueError(f"rule must be 'radial' or 'mean', got {rule!r}.")
  if not gradients or len(gradients) != len(weights):
    raise ValueError(
      "A merge needs a weight for each of at least one contribution, got"
      f" {len(gradients)} and {len(weights)} weights."
    )
  if not all(w >= 0 for w in weights) or not sum(weights) > 0:
    raise ValueError(
      f"weights must not be negative, and not all zero, got {weights!r}."
    )
  shares = [w / sum(weights) for w in weights]
  one = radial_directional_mean if rule == "radial" else _mean
  return jax.tree.map(lambda *rows: one(rows, shares), *gradients)


def radial_directional_mean(
  rows: Sequence[jax.Array], shares: Sequence[float]
) -> jax.Array:
  """The mean norm, in the mean direction.

  ``sum(w |v|) * d / |d|`` with ``d = sum(w v / |v|)``. The mean of M orthogonal
  arrays is sqrt(M) times shorter than they are; this one has their length, so
  that the outer learning rate need not change with the number of learners.

  Args:
    rows: arrays of equal shapes.
    shares: their weights, which add up to 1.

  Returns:
    An array of that shape, in float32. Zeros if the directions cancel out.

  Example:
    >>> a, b = jnp.array([2.0, 0.0]), jnp.array([0.0, 2.0])
    >>> mean = radial_directional_mean([a, b], [0.5, 0.5])
    >>> round(float(jnp.linalg.norm(mean)), 4)
    2.0

  References:
    Douillard et al. 2026, `Decoupled DiLoCo
    <https://arxiv.org/abs/2604.21428>`_, radial-directional averaging.
  """
  rows = [jnp.asarray(row, jnp.float32) for row in rows]
  norms = [jnp.sqrt(jnp.sum(jnp.square(row))) for row in rows]
  direction = _mean(
    [_direction(row, norm) for row, norm in zip(rows, norms, strict=True)],
    shares,
  )
  length = jnp.sqrt(jnp.sum(jnp.square(direction)))
  # The remainder of opposite directions is rounding error.
  sound = length > 1e-6
  unit = direction / jnp.where(sound, length, 1.0)
  return jnp.where(sound, _mean(norms, shares) * unit, 0.0)


def mix(own: Any, new: Any, alpha: float) -> Any:
  """Mixes a merged fragment in: ``alpha * own + (1 - alpha) * new``.

  Args:
    own: the learner's fragment.
    new: the merged one, of the same structure.
    alpha: the weight of its own, from 0 to 1.

  Returns:
    The mix, in the dtypes of ``own``.

  Raises:
    ValueError: if ``alpha`` is out of range.

  Example:
    >>> mix(jnp.array([0.0]), jnp.array([4.0]), 0.25)
    Array([3.], dtype=float32)
  """
  if not 0 <= alpha <= 1:
    raise ValueError(f"alpha must be from 0 to 1, got {alpha!r}.")

  def one(x: jax.Array, y: jax.Array) -> jax.Array:
    wide = jnp.asarray(y, jnp.float32)
    mixed = wide + alpha * (jnp.asarray(x, jnp.float32) - wide)
    return mixed.astype(jnp.result_type(x))

  return jax.tree.map(one, own, new)


def balanced_fragments(params: Any, fragments: int) -> Any:
  """Distributes the parameters over fragments of about equal sizes.

  The largest come first, each into the fragment that is the smallest so far.

  Args:
    params: a pytree of arrays.
    fragments: the number of fragments; at most the number of arrays.

  Returns:
    A pytree like the parameters, of fragment indices from 0; also usable as
    ``streaming_updates(fragments=lambda p: balanced_fragments(p, n))``.

  Raises:
    ValueError: if the number is out of range.

  Example:
    >>> sizes = {"a": jnp.zeros(5), "b": jnp.zeros(3), "c": jnp.zeros(2)}
    >>> balanced_fragments(sizes, 2)
    {'a': 0, 'b': 1, 'c': 1}
  """
  treedef: Any
  leaves, treedef = jax.tree.flatten(params)
  if type(fragments) is not int or not 1 <= fragments <= max(1, len(leaves)):
    raise ValueError(
      f"fragments must be from 1 to {len(leaves)}, the number of arrays, got"
      f" {fragments!r}."
    )
  heap = [(0, i) for i in range(fragments)]
  found = [0] * len(leaves)
  # One is added to each size, so that no fragment is empty.
  for i in sorted(range(len(leaves)), key=lambda i: -leaves[i].size):
    size, fragment = heapq.heappop(heap)
    found[i] = fragment
    heapq.heappush(heap, (size + leaves[i].size + 1, fragment))
  return treedef.unflatten(found)


def _mean(rows: Sequence[jax.Array], shares: Sequence[float]) -> jax.Array:
  total = jnp.zeros(jnp.shape(rows[0]), jnp.float32)
  for row, share in zip(rows, shares, strict=True):
    total += jnp.asarray(row, jnp.float32) * share
  return total


def _direction(row: jax.Array, norm: jax.Array) -> jax.Array:
  return row / jnp.where(norm > 0, norm, 1.0)
