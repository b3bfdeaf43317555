"""Arithmetic on a replica's leaves in the shape in which they are stored.

Under ``jax.shard_map`` the state of one replica has a leading axis of size 1. If an
optimizer computes without this axis, each new array is reshaped at the end. The
compiler for CPUs fuses the reshape with the computation, and so repeats the
computation wherever the array is used. That needs a copy of the old array, which is
overwritten meanwhile. An element-wise computation works on the stored shape as well.
"""

from collections.abc import Callable
from typing import Any

import jax

from optax_dist._internal import axes
from optax_dist._internal.leaves.elementwise import ELEMENTWISE
from optax_dist._internal.replica_blocks import block, row

_PLAIN = ELEMENTWISE | {"broadcast_in_dim"}
_CALLS = frozenset(["jit", "pjit", "closed_call"])


def on_blocks(fun: Callable[..., Any], *args: Any) -> Any:
  """Returns ``fun(*args)``, computed on blocks if ``fun`` is element-wise.

  Args:
    fun: a function of pytrees of arrays that returns one.
    *args: its arguments, as :func:`optax_dist._internal.replica_blocks.row` made
      them.

  Example:
    >>> import jax.numpy as jnp
    >>> on_blocks(lambda x: 2 * x, jnp.ones(2)).tolist()
    [2.0, 2.0]
  """
  if axes.platform() != "cpu" or not axes.is_fully_manual():
    return fun(*args)
  treedef: Any
  leaves, treedef = jax.tree.flatten(args)
  program, shapes = jax.make_jaxpr(
    lambda *leaves: fun(*treedef.unflatten(leaves)), return_shape=True
  )(*leaves)
  run = lambda *leaves: jax.core.eval_jaxpr(
    program.jaxpr, program.consts, *leaves
  )
  if _is_plain(program.jaxpr):
    results = row(jax.vmap(run)(*block(leaves)))
  else:
    results = run(*leaves)
  return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _is_plain(jaxpr: Any) -> bool:
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    if name in _CALLS:
      if not _is_plain(equation.params["jaxpr"].jaxpr):
        return False
    elif name not in _PLAIN:
      return False
  return True
