"""Models with variables that are not trained: which to train, and which to carry along.

A Flax module with batch normalization or dropout has more than parameters. An optimizer
that got all variables would decay a variance, and running statistics would never move.
So a step trains the parameters, and carries the other variables from step to step,
equal on all replicas.
"""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import axes
from optax_dist._internal.leaves.random_keys import fold_in, is_key

# Kinds of nnx variables that no optimizer may get.
_NOT_TRAINED = ("BatchStat", "RngState", "Cache", "Intermediate")

Names = tuple[axes.AxisName, ...]


@dataclasses.dataclass(frozen=True)
class Arrays:
  """Parameters without other variables."""

  transform_name: str

  def merge(self, trained: Any, carried: Any) -> Any:
    """Returns the model: undoes :func:`split`."""
    del carried
    return trained

  def call(
    self, loss: Callable[..., Any], has_aux: bool, trained: Any, *args: Any
  ) -> tuple[Any, tuple[Any, Any]]:
    """Returns the loss, the new variables, and the loss's auxiliary result.

    Args:
      loss: the loss.
      has_aux: whether the loss has an auxiliary result.
      trained: the parameters.
      *args: the variables of this replica, and the batch.
    """
    carried, batch = args
    out = loss(self.merge(trained, carried), batch)
    value, aux = out if has_aux else (out, None)
    return value, (None, aux)


@dataclasses.dataclass(frozen=True)
class Module(Arrays):
  """An nnx module, or a tree of them: its variables change while the loss runs."""

  graph: Any

  def merge(self, trained: Any, carried: Any) -> Any:
    return sys.modules["flax.nnx"].merge(self.graph, trained, carried)

  def call(
    self, loss: Callable[..., Any], has_aux: bool, trained: Any, *args: Any
  ) -> tuple[Any, tuple[Any, Any]]:
    carried, batch = args
    # Copies, because the loss changes the variables of the module that it gets.
    carried = jax.tree.map(lambda x: x, carried)
    model = self.merge(trained, carried)
    out = loss(model, batch)
    value, aux = out if has_aux else (out, None)
    return value, (split(self.transform_name, model)[2], aux)


@dataclasses.dataclass(frozen=True)
class Collections(Arrays):
  """The variables of a linen module: the loss returns those that changed."""

  kind: type

  def merge(self, trained: Any, carried: Any) -> Any:
    return self.kind({**carried, "params": trained})

  def call(
    self, loss: Callable[..., Any], has_aux: bool, trained: Any, *args: Any
  ) -> tuple[Any, tuple[Any, Any]]:
    carried, batch = args
    out = loss(self.merge(trained, carried), batch)
    rest = out[1] if isinstance(out, tuple) and len(out) == 2 else None
    new, aux = rest if has_aux and isinstance(rest, tuple) else (rest, None)
    if not isinstance(new, Mapping) or not new.keys() <= carried.keys():
      listed = ", ".join(map(repr, carried))
      returned = "(updates, aux)" if has_aux else "updates"
      raise ValueError(
        f"{self.transform_name}: the collections {listed} are not trained, so the loss"
        f" must return (scalar, {returned}), with what module.apply(...,"
        f" mutable=[{listed}]) returns as updates. Leave them out of the parameters if"
        " they don't change."
      )
    return out[0], (carried | dict(new), aux)


def split(transform_name: str, params: Any) -> tuple[Arrays, Any, Any]:
  """Returns a hashable form of a model, its parameters, and its other variables.

  Args:
    transform_name: the function that the model is passed to, for messages.
    params: arrays; an nnx module; or the collections of a linen module.

  Raises:
    ValueError: if it is the state of an nnx module that has more than parameters.
  """
  nnx = sys.modules.get("flax.nnx")
  if nnx is not None:
    # Compared by type: this runs in each step, and nnx's instance checks are slow.
    is_node = lambda x: issubclass(type(x), nnx.Module | nnx.Variable)
    types = set(map(type, jax.tree.leaves(params, is_leaf=is_node)))
    if any(issubclass(t, nnx.Module) for t in types):
      graph, trained, carried = nnx.split(params, nnx.Param, ...)
      return Module(transform_name, graph), trained, carried
    kinds = tuple(getattr(nnx, name) for name in _NOT_TRAINED)
    wrong = {t.__name__ for t in types if issubclass(t, kinds)}
    if wrong:
      raise ValueError(
        f"{transform_name}: the parameters have variables of the kinds"
        f" {', '.join(sorted(wrong))}, which are not trained. Give the module"
        " itself, or only its parameters: nnx.split(model, nnx.Param, ...)."
      )
  if isinstance(params, Mapping) and isinstance(params.get("params"), Mapping):
    carried = {name: x for name, x in params.items() if name != "params"}
    if carried:
      return (
        Collections(transform_name, type(params)),
        params["params"],
        carried,
      )
  return Arrays(transform_name), params, None


def of_replica(carried: Any, names: Names) -> Any:
  """Returns the variables that a replica computes with.

  Each draws from random streams of its own; the first one draws what one device
  alone would draw.
  """
  index = jax.lax.axis_index(names)

  def own(x: Any) -> Any:
    return jnp.where(index, fold_in(x, index), x) if is_key(x) else x

  return jax.tree.map(own, carried)


def of_all(
  transform_name: str,
  old: Any,
  own: Any,
  new: Any,
  mean: Callable[[list, list], list],
) -> Any:
  """Returns the new variables, equal on all replicas.

  Floating-point variables, such as running statistics, are averaged. Keys of random
  streams stay, and the counters of their draws are equal already.

  Args:
    transform_name: the function, for messages.
    old: the variables before the step.
    own: the same, of this replica: from :func:`of_replica`.
    new: those of this replica after the step.
    mean: averages arrays over the replicas; takes also the old ones.

  Raises:
    ValueError: if the loss has other variables than before, or has replaced a key.
  """
  structures: list[Any] = [jax.tree.structure(x) for x in (old, new)]
  if structures[0] != structures[1]:
    raise ValueError(
      f"{transform_name}: the model has other variables after the loss than before:"
      f" {structures[1]} instead of {structures[0]}. Create them before, and"
      " return what is only a result with has_aux=True."
    )

  def check(path: Any, old: Any, own: Any, new: Any) -> Any:
    at = jax.tree_util.keystr(path)
    if jnp.shape(old) != jnp.shape(new) or old.dtype != new.dtype:
      raise ValueError(
        f"{transform_name}: variable {at} has another shape or dtype after the loss:"
        f" {jnp.shape(new)} {new.dtype}, before {jnp.shape(old)} {old.dtype}."
      )
    if is_key(old) and new is not own:
      raise ValueError(
        f"{transform_name}: the loss replaces the random key {at}. Draw from a stream"
        " that counts, as nnx.Rngs does, or pass keys as rows of the batch."
      )
    return old if is_key(old) else new

  new = jax.tree_util.tree_map_with_path(check, old, own, new)
  treedef: Any
  leaves, treedef = jax.tree.flatten(new)
  at = [i for i, x in enumerate(leaves) if jnp.issubdtype(x.dtype, jnp.inexact)]
  before = jax.tree.leaves(old)
  means = mean([leaves[i] for i in at], [before[i] for i in at]) if at else []
  for i, x in zip(at, means, strict=True):
    leaves[i] = x
  return treedef.unflatten(leaves)
