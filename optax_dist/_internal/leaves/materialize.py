"""Scalars that the CPU compiler computes once and keeps in memory.

XLA for CPUs inlines cheap computations into every kernel that needs them. With
hundreds of leaves, a scalar computed from all of them is then recomputed, and compiled,
for each: a user would wait minutes for the first step. The result of a conditional is
computed before it is used.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import primitives

from optax_dist._internal import axes


def materialize(tree: Any) -> Any:
  """Returns the same values, computed once if the platform is CPU.

  Use it for scalars that are computed from many leaves and used with each.

  Args:
    tree: a pytree of scalar arrays.

  Returns:
    The same values.

  Example:
    >>> materialize(jnp.asarray(True)).item()
    True
  """
  if axes.platform() != "cpu":
    return tree
  treedef: Any
  leaves, treedef = jax.tree.flatten(tree)
  # Not `jax.lax.cond`, whose conversion of the predicate would take a kernel. The
  # barriers keep the compiler from removing a conditional with a known index or equal
  # branches; they are no kernels, and are removed later.
  index = jax.lax.optimization_barrier(jnp.asarray(1, jnp.int32))
  branches = tuple(
    jax.make_jaxpr(fun)(leaves)
    for fun in (jax.lax.optimization_barrier, lambda xs: xs)
  )
  kept = primitives.cond_p.bind(index, *leaves, branches=branches)
  return treedef.unflatten(kept)
