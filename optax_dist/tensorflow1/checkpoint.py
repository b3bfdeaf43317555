"""Restores a TensorFlow 1 checkpoint, to continue its run."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist.states import slots

# In the order in which TensorFlow's optimizers create them: a variable's first
# slot is called `Adam`, the next one `Adam_1`, whatever they are for.
_ORDER = (
  "rms",
  "mg",
  "accum",
  "accum_update",
  "linear",
  "accumulator",
  "gradient_accumulator",
  "gradient_squared_accumulator",
  "m",
  "v",
  "momentum",
)
# What follows the variable's name in its moving average, which is no slot.
_AVERAGE = "ExponentialMovingAverage"


class Reader(Protocol):
  """The part of `tf.train.load_checkpoint`'s result that is used here."""

  def get_variable_to_shape_map(self) -> Mapping[str, Any]:
    """Returns the name and shape of each variable."""

  def get_tensor(self, name: str) -> Any:
    """Returns the value of a variable, an array."""


class Restored(NamedTuple):
  """The content of a TensorFlow checkpoint.

  Attributes:
    params: The parameters, a tree like the one given.
    opt_state: The optimizer's state, with its slots, scalars and counters.
    global_step: The step of the checkpoint, an int.
  """

  params: optax.Params
  opt_state: optax.OptState
  global_step: int


def restore_checkpoint(
  checkpoint: str | os.PathLike[str] | Reader,
  params: optax.Params,
  opt_state: optax.OptState,
  *,
  name: str | None = None,
  variable: Callable[[str], str] = lambda path: path,
) -> Restored:
  """Reads parameters and slots of a TensorFlow 1 job.

  With an optimizer of `optax_dist.optimizers` training continues on
  TensorFlow's trajectory.

  Args:
    checkpoint: The path of a checkpoint, for which TensorFlow must be
      installed, or the result of ``tf.train.load_checkpoint``.
    params: Parameters with the shapes and dtypes of the variables.
    opt_state: The optimizer's state, from ``init(params)``; including chains
      and wrappers. Moving averages of
      :func:`optax_dist.params_ema` are restored too.
    name: The name of TensorFlow's optimizer (``"Adam"``); by default it is
      determined from the names in the checkpoint.
    variable: Maps a parameter's path, which is ``"layer/kernel"`` for
      ``params["layer"]["kernel"]``, to the name of a variable. By default the
      same. Scalars (``"global_step"``, ``"beta1_power"``) are mapped too if the
      checkpoint has the result, and otherwise keep their names.

  Returns:
    Parameters, optimizer state and global step.

  Raises:
    KeyError: If the checkpoint lacks a variable; the message lists those it
      has.
    ValueError: If a shape differs, the name of the optimizer is ambiguous, or
      the state has what no optimizer of TensorFlow has, such as the center of
      elastic averaging.
    ModuleNotFoundError: If a path is given and TensorFlow is not installed.

  Source: ``tf.compat.v1.train.Saver`` and the slot creator of
    ``tf.compat.v1.train.Optimizer``, which name the variables.

  Example:
    >>> import optax_dist
    >>> class Job:  # In place of tf.train.load_checkpoint("gs://job/model.ckpt").
    ...   found = {
    ...     "dense/kernel": np.ones(2, np.float32),
    ...     "dense/kernel/Momentum": np.full(2, 0.5, np.float32),
    ...     "global_step": np.int64(7),
    ...   }
    ...   def get_variable_to_shape_map(self):
    ...     return {name: list(array.shape) for name, array in self.found.items()}
    ...   def get_tensor(self, name):
    ...     return self.found[name]
    >>> params = {"dense": {"kernel": jnp.zeros(2)}}
    >>> tx = optax_dist.optimizers.momentum(0.1, 0.9)
    >>> found = restore_checkpoint(Job(), params, tx.init(params))
    >>> found.global_step, found.params["dense"]["kernel"].tolist()
    (7, [1.0, 1.0])
    >>> optax_dist.states.get_slot(found.opt_state, "dense/kernel", "momentum").tolist()
    [0.5, 0.5]
  """
  reader = _reader(checkpoint)
  known = frozenset(reader.get_variable_to_shape_map())

  def read(variable_name: str, like: Any, what: str) -> jax.Array:
    if variable_name not in known:
      raise KeyError(
        f"{what} should be the variable {variable_name!r}, which the checkpoint"
        f" has not; it has {sorted(known)}. `variable=` gives other names."
      )
    value = np.asarray(reader.get_tensor(variable_name))
    if value.shape != like.shape:
      raise ValueError(
        f"{what} has the shape {like.shape}, but the variable"
        f" {variable_name!r} {value.shape}"
      )
    return jnp.asarray(value, like.dtype)

  def read_scalar(scalar: str, like: Any) -> jax.Array:
    # It may have been made in another scope than the parameters, whose names may
    # be all that `variable` knows.
    try:
      mapped = variable(scalar)
    except (LookupError, ValueError):
      mapped = scalar
    return read(
      mapped if mapped in known else scalar, like, f"the scalar {scalar!r}"
    )

  def path_of(path: Any) -> str:
    return "/".join(slots.path_keys(path))

  found_params = jax.tree_util.tree_map_with_path(
    lambda path, leaf: read(
      variable(path_of(path)), leaf, f"the parameter {path_of(path)!r}"
    ),
    params,
  )
  global_step = int(read_scalar("global_step", np.zeros((), np.int32)))

  leaves, treedef = jax.tree.flatten(opt_state)
  # Unique leaves, to identify them later.
  marked = [
    jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves
  ]
  place = {id(leaf): i for i, leaf in enumerate(marked)}
  trees = list(slots.slot_trees(jax.tree.unflatten(treedef, marked)))
  names = [names[0] for names, _ in trees]
  of_optimizer = set(names) - {"averages"}
  unknown = sorted(of_optimizer - set(_ORDER))
  if unknown:
    raise ValueError(
      f"TensorFlow has no optimizer with the slots {unknown}, so they are in no"
      " checkpoint of it"
    )
  if name is None and of_optimizer:
    name = _optimizer_name(known, [variable(path) for path in _paths(params)])
  suffixes: dict[str, Any] = {"averages": _AVERAGE}
  for i, slot in enumerate(sorted(of_optimizer, key=_ORDER.index)):
    suffixes[slot] = f"{name}_{i}" if i else name
  for slot, (_, tree) in zip(names, trees, strict=True):
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
      what = f"the slot {slot!r} of {path_of(path)!r}"
      leaves[place[id(leaf)]] = read(
        f"{variable(path_of(path))}/{suffixes[slot]}", leaf, what
      )
  for i, (path, _) in enumerate(jax.tree_util.tree_leaves_with_path(opt_state)):
    keys = slots.path_keys(path)
    if keys[-1] in ("count", "global_step", "local_step", "num_updates"):
      leaves[i] = jnp.full_like(leaves[i], global_step)
    elif keys[-1] == "pending_rate":
      # TensorFlow's averages have made their last move.
      leaves[i] = jnp.zeros_like(leaves[i])
    elif "scalars" in keys:
      leaves[i] = read_scalar(keys[-1], leaves[i])
  return Restored(
    found_params, jax.tree.unflatten(treedef, leaves), global_step
  )


def _reader(checkpoint: Any) -> Reader:
  if not isinstance(checkpoint, str | os.PathLike):
    return checkpoint
  try:
    import tensorflow as tf
  except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
      "TensorFlow's checkpoints are read by TensorFlow, which is not installed."
      " Install it here, or convert the checkpoint where it is, and pass an"
      " object with `get_variable_to_shape_map` and `get_tensor`."
    ) from error
  return tf.train.load_checkpoint(os.fspath(checkpoint))


def _paths(params: Any) -> list[str]:
  return [
    "/".join(slots.path_keys(path))
    for path, _ in jax.tree_util.tree_leaves_with_path(params)
  ]


def _optimizer_name(known: frozenset[str], variables: list[str]) -> str:
  """Extracts `Adam` from `layer/kernel/Adam` and `layer/kernel/Adam_1`."""
  found = {
    re.sub(r"_\d+$", "", other.removeprefix(f"{variable}/"))
    for variable in variables
    for other in known
    if other.startswith(f"{variable}/")
  } - set(variables)
  # Moving averages have names like slots.
  found -= {_AVERAGE}
  if len(found) != 1:
    raise ValueError(
      "the checkpoint does not say which optimizer's slots it has: pass `name=`,"
      f" one of {sorted(found)}"
    )
  return found.pop()
