"""The transformation inside a transform: what is checked wherever one is called.

Optax passes extra keyword arguments from transformation to transformation, and each
takes the arguments that it knows. So a misspelled argument passes through all of them
and is ignored silently. The signature of an inner transformation does not show which
arguments it knows: a chain accepts any. To find out which arguments it *uses*, it is
traced with a value that can't be used.

Optax's transformations ignore a parameter without a gradient (None), but some drop its
state: its momentum in the new state is None. A state that changes its structure can't
pass a conditional, a scan or a checkpoint, and a later gradient of that parameter finds
no momentum.
"""

import difflib
from collections.abc import Iterable
from typing import Any

import jax
import optax

from optax_dist._internal import axes, checks, step_count
from optax_dist._internal.extra_args import CONVENTIONAL


def checked(
  transform_name: str,
  inner: optax.GradientTransformation,
  names: tuple[axes.AxisName, ...],
  *,
  argument: str = "inner",
  known: Iterable[str] | None = (),
  counts_steps: bool = True,
) -> optax.GradientTransformationExtraArgs:
  """Returns a transformation that a transform can call.

  Args:
    transform_name: the transform, for messages.
    inner: any transformation.
    names: names of the axes over the replicas.
    argument: the transform's argument that it is.
    known: the keyword arguments that the transform itself takes; None if others may
      be for a transformation beside it.
    counts_steps: whether the transform's state has a ``global_step``.

  Returns:
    The same transformation, which takes keyword arguments, and whose new state has
    the old one's arrays in place of None. Its ``update`` raises a TypeError for a
    keyword argument that is never used, and explains JAX's errors.

  Raises:
    ValueError: if it is not a transformation.

  Example:
    >>> import jax.numpy as jnp
    >>> tx = checked("sync_replicas", optax.trace(0.5), ("data",))
    >>> state = tx.init({"w": jnp.ones(1), "step": jnp.array(3)})
    >>> tx.update({"w": jnp.ones(1), "step": None}, state)[1].trace["step"].item()
    0
  """
  checks.transformation(argument, inner)
  inner = optax.with_extra_args_support(inner)

  def update_fn(
    updates: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, optax.OptState]:
    args = updates, state, params
    if known is not None:
      check_used(transform_name, inner.update, args, extra_args, known)
    try:
      updates, new = inner.update(*args, **extra_args)
    except TypeError as error:
      better = _explanation(transform_name, argument, names, str(error))
      if better is None:
        raise
      raise TypeError(better) from error
    return updates, _keep(state, new)

  init_fn = (
    step_count.counted_outside(inner.init) if counts_steps else inner.init
  )
  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


class _Unusable:
  """An argument that fails where it is used, as any object does but in these cases."""

  def __getattr__(self, name: str) -> Any:
    raise TypeError

  def __bool__(self) -> bool:
    raise TypeError

  def __eq__(self, other: object) -> bool:
    raise TypeError

  __hash__ = object.__hash__


def check_used(
  transform_name: str,
  update: Any,
  args: tuple,
  extra_args: dict[str, Any],
  known: Iterable[str],
) -> None:
  """Checks that the inner transformation uses each of ``extra_args``.

  Args:
    transform_name: the transform that got them, for the message.
    update: the ``update`` of the inner transformation.
    args: the arguments it is called with.
    extra_args: the keyword arguments that ``transform_name`` itself does not take.
    known: the arguments that it does take, for the message.

  Raises:
    TypeError: if one is never used, and isn't one that training loops pass to
      every optimizer.
  """
  for name in extra_args.keys() - CONVENTIONAL:
    probed = extra_args | {name: _Unusable()}
    try:
      jax.eval_shape(lambda probed=probed: update(*args, **probed))
    except Exception:
      # The argument is used; or the call itself will report its fault.
      continue
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f" Did you mean `{close[0]}`?" if close else ""
    raise TypeError(
      f"{transform_name}: update got an unexpected keyword argument {name!r}, which"
      f" neither {transform_name} nor the transformation in it uses.{hint}"
    )


def _explanation(
  transform_name: str,
  argument: str,
  names: tuple[axes.AxisName, ...],
  error: str,
) -> str | None:
  """Returns an explanation of a TypeError of the inner transformation, or None."""
  if "missing" in error and "required" in error:
    what = ", which gets no keyword arguments," * (argument == "outer")
    return (
      f"`{argument}`{what} needs an argument: {error}. Pass it to update, as in"
      " update(gradients, state, params, value=loss), or use it as `inner`."
    )
  tracked = axes.tracked_axes(names)
  if tracked and "equal" in error and "{V:" in error:
    return (
      f"{transform_name}: the transformation in it has a loop or a branch that starts"
      " from numbers that are equal on all replicas, and goes on with those of one"
      f" replica, which JAX refuses where it tracks axis {axes.listed(tracked)}."
      " Pass check_vma=False to jax.shard_map, or use jax.vmap or jax.pmap."
    )
  return None


def _keep(old: Any, new: Any) -> Any:
  treedefs: list[Any] = [jax.tree.structure(x) for x in (old, new)]
  if treedefs[0] == treedefs[1]:
    return new
  try:
    return jax.tree.map(lambda x, y: x if y is None else y, old, new)
  except ValueError:
    return new  # The structures differ by more than parts that are None.
