"""Keyword arguments of ``update``, for an optimizer that all replicas share.

Each replica passes its own loss. An optimizer whose state all replicas share must get
the same value on all of them; otherwise their parameters would drift apart.
"""

import functools
import inspect
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import axes, collectives
from optax_dist._internal.indexed_slices import as_dense
from optax_dist._internal.leaves import precision

# Extra arguments of optax's own transformations: numbers and arrays, functions of
# the parameters that return a loss, and one that returns a gradient. Training loops
# pass these to every optimizer, whether it uses them or not.
_ARRAYS = frozenset({"value", "grad"})
_LOSSES = frozenset({"value_fn", "obj_fn"})
_FUNCTIONS = _LOSSES | {"grad_fn"}
CONVENTIONAL = _ARRAYS | _FUNCTIONS


def check_equal(
  transform_name: str,
  names: tuple[axes.AxisName, ...],
  extra_args: dict[str, Any],
) -> None:
  """Checks the arguments of an optimizer that all replicas share.

  Those that :func:`of_all` averages are not checked, and neither are arguments of
  the functions among them. For others, JAX shows whether they vary over tracked axes
  and under ``vmap``; it doesn't under ``pmap`` and with ``check_vma=False``.

  Raises:
    ValueError: if one is known to vary over the axes ``names``.
  """
  of_functions = {
    name
    for key in extra_args.keys() & _FUNCTIONS
    if callable(extra_args[key])
    for name in inspect.signature(extra_args[key]).parameters
  }
  for name in sorted(extra_args.keys() - CONVENTIONAL - of_functions):
    leaves = jax.tree.leaves(extra_args[name])
    varying = frozenset(names) & frozenset().union(
      *map(axes.known_to_vary, leaves)
    )
    if varying:
      raise ValueError(
        f"{transform_name}: `{name}` varies over axis {axes.listed(varying)}, but it"
        " is for an optimizer that all replicas share. Pass the same on all of them,"
        f" for example jax.lax.pmean({name}, axis_name)."
      )


def check_state(
  transform_name: str, names: tuple[axes.AxisName, ...], old: Any, new: Any
) -> None:
  """Checks that an optimizer's state is still equal on all replicas, by its type.

  Raises:
    ValueError: if a part of it is not; names it.
  """
  before = axes.all_varying_axes(old) & set(names)
  for path, x in jax.tree_util.tree_leaves_with_path(new):
    varying = axes.varying_axes(x) & set(names) - before
    if varying:
      raise ValueError(
        f"{transform_name}: the inner state{jax.tree_util.keystr(path)} is one of all"
        f" replicas, but this update makes it vary over axis {axes.listed(varying)}: it"
        " was computed from something that each replica has of its own, such as an"
        " argument of update that is a function of its batch."
      )


def of_all(
  names: tuple[axes.AxisName, ...],
  extra_args: dict[str, Any],
  counts: jax.Array | None = None,
) -> dict[str, Any]:
  """Returns arguments that are equal on all replicas: those that optax names, averaged.

  Args:
    names: the bound axes over the replicas.
    extra_args: the keyword arguments.
    counts: whether this replica counts (boolean scalar); None if all do.

  Returns:
    The arguments, with the means of arrays, and of the results of functions.
  """
  mean = functools.partial(_mean, names, counts)
  new = dict(extra_args)
  for name in extra_args.keys() & _ARRAYS:
    new[name] = mean(extra_args[name])
  for name in extra_args.keys() & _FUNCTIONS:
    if callable(extra_args[name]):
      mean_of = _mean_loss if name in _LOSSES else _mean_gradient
      new[name] = mean_of(names, extra_args[name], mean)
  return new


def _mean(
  names: tuple[axes.AxisName, ...], counts: jax.Array | None, tree: Any
) -> Any:
  """The mean over the replicas that count, of a tree of arrays."""
  treedef: Any
  leaves, treedef = jax.tree.flatten(as_dense(tree))
  at = [i for i, x in enumerate(leaves) if _may_differ(x, names)]
  own = [precision.widen(leaves[i]) for i in at]
  if counts is None:
    count: Any = math.prod(jax.lax.axis_size(name) for name in names)
    own = axes.cast_to_varying(own, names)
    sums = collectives.sum_leaves(own, [names] * len(own))
  else:
    sums, number = collectives.sum_counted(own, counts, names)
    count = jnp.maximum(number, 1)
  for i, total in zip(at, sums, strict=True):
    mean = total / jnp.asarray(count, jnp.finfo(total.dtype).dtype)
    leaves[i] = precision.cast_like(mean, leaves[i])
  return treedef.unflatten(leaves)


def _may_differ(x: Any, names: tuple[axes.AxisName, ...]) -> bool:
  """Whether replicas may have different values: not of a constant."""
  if not isinstance(x, jax.core.Tracer):
    return False
  tracked = axes.tracked_axes(names)
  equal = len(tracked) == len(names) and not axes.varying_axes(x) & tracked
  return jnp.issubdtype(x.dtype, jnp.inexact) and not equal


_Mean = Callable[[Any], Any]


def _mean_gradient(
  names: tuple[axes.AxisName, ...], fun: Callable[..., Any], mean: _Mean
) -> Callable[..., Any]:
  @functools.wraps(fun)
  def mean_gradient(params: Any, *args: Any, **kwargs: Any) -> Any:
    # Differentiated by parameters of this replica's own: JAX would sum the gradient of
    # replicated ones.
    return mean(fun(axes.cast_to_varying(params, names), *args, **kwargs))

  return mean_gradient


def _mean_loss(
  names: tuple[axes.AxisName, ...], fun: Callable[..., Any], mean: _Mean
) -> Callable[..., Any]:
  """Returns the mean of the replicas' losses, with their mean gradient."""

  @functools.wraps(fun)
  def mean_loss(params: Any, *args: Any, **kwargs: Any) -> Any:
    def own(params: Any) -> Any:
      return fun(params, *args, **kwargs)

    @jax.custom_vjp
    def loss(params: Any) -> Any:
      return mean(own(axes.cast_to_varying(params, names)))

    def forward(params: Any) -> tuple[Any, Any]:
      params = axes.cast_to_varying(params, names)
      return mean(jax.value_and_grad(own)(params))

    def backward(gradient: Any, by: jax.Array) -> tuple[Any]:
      return (jax.tree.map(lambda g: g * by.astype(g.dtype), gradient),)

    loss.defvjp(forward, backward)
    return loss(params)

  return mean_loss
