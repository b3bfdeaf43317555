"""Adasum: a sum of gradients that counts their common part once.

It serves ``cross_shard(reduction="adasum")``.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import axes, collectives, provenance
from optax_dist._internal.indexed_slices import has_slices
from optax_dist._internal.leaves import precision, update_leaves

_SCATTERED = (
  "so no replica has a gradient of its own to combine. Use cross_shard(...,"
  " param_specs=...) for it (optax.partition)."
)


def by_adasum(
  transform_name: str, names: tuple[axes.AxisName, ...]
) -> optax.GradientTransformationExtraArgs:
  """Replaces each replica's own updates with their Adasum over the replicas.

  Args:
    transform_name: the transform that this is part of, for messages.
    names: names of the axes over the replicas.
  """

  def update_fn(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    del params, extra_args
    axes.check_bound(names, transform_name)
    update_leaves.check_gradients(transform_name, updates, names, _SCATTERED)
    if has_slices(updates):
      raise ValueError(
        f"{transform_name}: reduction='adasum' takes no sparse updates."
      )

    def total(x: jax.Array) -> jax.Array:
      rows = collectives.gather_replicas(x, names)
      return precision.cast_like(adasum(precision.for_sums(rows)), x)

    with provenance.reduced_over(names):
      new = jax.tree.map(lambda x: axes.in_auto(total, x, x), updates)
    return new, state

  return optax.GradientTransformationExtraArgs(
    optax.init_empty_state, update_fn
  )


def adasum(rows: jax.Array) -> jax.Array:
  """Returns the Adasum of gradients, given as rows.

  Two gradients a and b give ``(1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b``:
  their sum if they are orthogonal, their mean if they are equal. More gradients
  are split into halves, and the results of both are combined.

  Args:
    rows: array of shape (replicas, ...); the dot products are over all but the
      first axis, in float32 or wider.

  Returns:
    An array like one row.

  Example:
    >>> adasum(jnp.array([[1.0, 0.0], [0.0, 2.0]])).tolist()
    [1.0, 2.0]
    >>> adasum(jnp.array([[3.0, 4.0], [3.0, 4.0]])).tolist()
    [3.0, 4.0]

  References:
    Maleki et al. 2020, `Scaling Distributed Training with Adaptive Summation
    <https://arxiv.org/abs/2006.02924>`_.
  """
  count = rows.shape[0]
  if count == 1:
    return rows[0]
  a, b = adasum(rows[: (count + 1) // 2]), adasum(rows[(count + 1) // 2 :])
  narrow = jnp.finfo(rows.dtype).bits < 32
  wide = jnp.float32 if narrow else rows.dtype
  a, b = a.astype(wide), b.astype(wide)
  # The squares of tiny numbers would be 0, and those of huge ones infinite.
  (unit_a, size_a), (unit_b, size_b) = _sized(a), _sized(b)
  dot = _dot(unit_a, unit_b)
  total = a - _share(dot, unit_a) * size_b * unit_a
  total += b - _share(dot, unit_b) * size_a * unit_b
  return total.astype(rows.dtype)


def _sized(a: jax.Array) -> tuple[jax.Array, jax.Array]:
  """Returns an array with a largest magnitude of 1, and that of ``a``."""
  size = jnp.max(jnp.abs(a), initial=0)
  return a / jnp.where(size > 0, size, 1).astype(a.dtype), size.astype(a.dtype)


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.sum(jnp.real(jnp.conj(a) * b)).astype(a.dtype)


def _share(dot: jax.Array, unit: jax.Array) -> jax.Array:
  square = _dot(unit, unit)
  # A zero gradient has no direction.
  some = jnp.real(square) > 0
  return jnp.where(some, dot / jnp.where(some, 2 * square, 1), 0)
