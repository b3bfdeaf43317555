"""Scalars that the CPU compiler computes once and keeps in memory.

XLA for CPUs compiles equal kernels once, and inlines cheap computations into
every kernel that needs them. Both go wrong with hundreds of leaves: a scalar
computed from all leaves is recomputed for each of them, and kernels that only
differ in a constant are compiled one by one. Either takes minutes. The result
of a conditional is computed before it is used, and the kernels that use it are
equal.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
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
  # The compiler removes a conditional with trivial branches; the barrier, which
  # is no kernel, prevents that.
  kept = _second(jax.lax.optimization_barrier, lambda xs: xs, leaves)
  return treedef.unflatten(kept)


def integers(values: Sequence[int]) -> list[Any]:
  """Returns constants that are kernel arguments if the platform is CPU.

  Args:
    values: Python integers.

  Returns:
    An int32 scalar for each.
  """
  if axes.platform() != "cpu":
    return [np.int32(value) for value in values]
  return _second(
    lambda _: [np.int32(0)] * len(values),
    lambda _: [np.int32(value) for value in values],
    [],
  )


def _second(
  first: Callable[[list], list], second: Callable[[list], list], xs: list
) -> list[jax.Array]:
  """Returns ``second(xs)``, by a conditional that the compiler keeps."""
  # Not `jax.lax.cond`: converting its predicate to an index is a kernel. The
  # compiler removes the barrier only after simplifying conditionals.
  index = jax.lax.optimization_barrier(jnp.asarray(1, jnp.int32))
  branches = tuple(jax.make_jaxpr(fun)(xs) for fun in (first, second))
  return primitives.cond_p.bind(index, *xs, branches=branches)
