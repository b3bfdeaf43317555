"""Arithmetic on a replica's leaves in the shape in which they are stored.

Under ``jax.shard_map`` the state of one replica has a leading axis of size 1. If an
optimizer computes without this axis, each new array is reshaped at the end. The
compiler for CPUs fuses the reshape with the computation, and so repeats the
computation wherever the array is used. That needs a copy of the old array, which is
overwritten meanwhile. An element-wise computation works on the stored shape as well.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as _core

from optax_dist._internal import axes
from optax_dist._internal.leaves.elementwise import is_elementwise
from optax_dist._internal.leaves.evaluate import evaluate
from optax_dist._internal.replica_blocks import block, row

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
  if _is_plain(program.jaxpr):
    blocks = [block(x) if jnp.ndim(x) else x for x in leaves]
    results = _run_on_blocks(program, blocks)
    results = [row(x) if jnp.ndim(x) else x for x in results]
  else:
    results = jax.core.eval_jaxpr(program.jaxpr, program.consts, *leaves)
  return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _run_on_blocks(program: Any, args: Sequence[Any]) -> list[Any]:
  """Runs an element-wise program with a leading axis of every array.

  Scalars stay scalars: XLA divides by an array of one element in two ways, which are
  different kernels.
  """
  consts = [block(x) if jnp.ndim(x) else x for x in program.consts]
  jaxpr = program.jaxpr
  env = dict(
    zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *args), strict=True)
  )
  look_up = lambda v: v.val if isinstance(v, _core.Literal) else env[v]
  for equation in jaxpr.eqns:
    operands = [look_up(v) for v in equation.invars]
    if equation.primitive.name in _CALLS:
      results = _run_on_blocks(equation.params["jaxpr"], operands)
    elif equation.primitive.name == "broadcast_in_dim":
      results = [_broadcast(operands[0], equation)]
    else:
      results = evaluate(equation, operands)
      if not equation.primitive.multiple_results:
        results = [results]
    env.update(zip(equation.outvars, results, strict=True))
  return [look_up(v) for v in jaxpr.outvars]


def _broadcast(x: Any, equation: Any) -> Any:
  shape = equation.params["shape"]
  if not shape:
    return x
  places = [i + 1 for i in equation.params["broadcast_dimensions"]]
  return jax.lax.broadcast_in_dim(
    x, (1, *shape), [0, *places] if places else []
  )


def _is_plain(jaxpr: Any) -> bool:
  for equation in jaxpr.eqns:
    name = equation.primitive.name
    if name in _CALLS:
      if not _is_plain(equation.params["jaxpr"].jaxpr):
        return False
    elif name != "broadcast_in_dim" and not is_elementwise(equation):
      return False
  return True
