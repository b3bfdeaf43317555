"""Restores a TensorFlow 1 checkpoint, to continue its run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist._internal import checks, parts
from optax_dist._internal.placement.replica_blocks import is_per_replica
from optax_dist.states import slots
from optax_dist.tensorflow1 import _slot_variables

# Fields of states that hold the global step.
_STEPS = ("global_step", "local_step", "num_updates", "gradient_step")


# TensorFlow's steps have 64 bits.
_MOST = 2**63 - 1


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
  global_step: int | None = None,
) -> Restored:
  """Reads parameters and slots of a TensorFlow 1 job.

  With an optimizer of `optax_dist.optimizers` training continues on
  TensorFlow's trajectory.

  Slots are found in whatever scope the optimizer was built in:
  ``training/dense/kernel/Adam`` or ``OptimizeLoss/dense/kernel/Adam``; also those
  of Keras (``Adam/dense/kernel/m``) and of BERT (``dense/kernel/adam_m``), and
  those of several optimizers for the groups of ``optax.partition``.

  Args:
    checkpoint: The path of a checkpoint, for which TensorFlow must be
      installed, or the result of ``tf.train.load_checkpoint``.
    params: Parameters with the shapes and dtypes of the variables.
    opt_state: The optimizer's state, from ``init(params)``; including chains,
      wrappers and :func:`optax_dist.sharded`. Moving averages of
      :func:`optax_dist.params_ema` are restored too. What ``optax.MultiSteps`` has
      accumulated starts anew. ``()`` to read the parameters and the step alone,
      from a checkpoint without slots: RETURNN's has none.
    name: If the checkpoint has several variables for a slot, those to take: the
      name of TensorFlow's optimizer (``"Adam"``), a scope, or a pattern from the
      error (``"training/*/Adam"``).
    variable: Maps a parameter's path, which is ``"layer/kernel"`` for
      ``params["layer"]["kernel"]``, to the name of a variable. By default the
      same. Scalars (``"global_step"``, ``"beta1_power"``) are mapped too if the
      checkpoint has the result, and otherwise keep their names.
    global_step: The step, for a checkpoint that has none.

  Returns:
    Parameters, optimizer state and global step.

  Raises:
    KeyError: If the checkpoint lacks a variable, or has several for a slot; the
      message lists those it has.
    ValueError: If an argument is invalid, a shape differs, or the state has what no
      optimizer of TensorFlow has, such as the center of elastic averaging.
    ModuleNotFoundError: If a path is given and TensorFlow is not installed.

  Source: ``tf.compat.v1.train.Saver`` and the slot creator of
    ``tf.compat.v1.train.Optimizer``, which name the variables.

  Example:
    >>> import optax_dist
    >>> class Job:  # In place of tf.train.load_checkpoint("gs://job/model.ckpt").
    ...   arrays = {
    ...     "dense/kernel": np.ones(2, np.float32),
    ...     "dense/kernel/Momentum": np.full(2, 0.5, np.float32),
    ...     "global_step": np.int64(7),
    ...   }
    ...   def get_variable_to_shape_map(self):
    ...     return {name: list(array.shape) for name, array in self.arrays.items()}
    ...   def get_tensor(self, name):
    ...     return self.arrays[name]
    >>> params = {"dense": {"kernel": jnp.zeros(2)}}
    >>> tx = optax_dist.optimizers.momentum(0.1, 0.9)
    >>> job = restore_checkpoint(Job(), params, tx.init(params))
    >>> job.global_step, job.params["dense"]["kernel"].tolist()
    (7, [1.0, 1.0])
    >>> optax_dist.states.get_slot(job.opt_state, "dense/kernel", "momentum").tolist()
    [0.5, 0.5]
  """
  checks.function("variable", variable)
  if global_step is not None:
    global_step = checks.count("global_step", global_step, least=0, most=_MOST)
  variables = _Variables(_reader(checkpoint), variable)
  found_params = jax.tree_util.tree_map_with_path(
    lambda path, leaf: variables.read(
      variable(_path(path)), leaf, f"The parameter {_path(path)!r}"
    ),
    params,
  )

  shapes = {
    _path(path): jnp.shape(x)
    for path, x in jax.tree_util.tree_leaves_with_path(params)
  }
  opt_state, scopes = _with_slots(opt_state, shapes, variables, variable, name)
  updates = variables.scalar("iter", scopes, None)
  if global_step is None:
    global_step = variables.step(updates)
  # Keras has a count of its own. (In RETURNN's wrapper, that count stays 0.)
  count = int(updates or 0) or global_step

  def restored(key_path: Any, leaf: Any) -> Any:
    """The counters and scalars of the state."""
    keys = slots.path_keys(key_path)
    if keys[-1] in _STEPS:
      return jnp.full_like(leaf, global_step)
    if keys[-1] == "count":
      return jnp.full_like(leaf, count)
    if keys[-1] == "pending_rate":
      # TensorFlow's averages have made their last move.
      return jnp.zeros_like(leaf)
    if "scalars" in keys:
      scalar = variables.scalar(keys[-1], scopes, leaf)
      return jnp.asarray(scalar, leaf.dtype)
    return leaf

  state = jax.tree_util.tree_map_with_path(restored, opt_state)
  return Restored(found_params, state, global_step)


def _with_slots(
  opt_state: optax.OptState,
  shapes: Mapping[str, tuple[int, ...]],
  variables: _Variables,
  variable: Callable[[str], str],
  name: str | None,
) -> tuple[optax.OptState, set[str]]:
  """Returns a state with its slots read, and the scopes that they are in."""
  treedef: Any
  leaves, treedef = jax.tree.flatten(opt_state)
  # Unique leaves, to identify them later.
  marked = [
    jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x)) for x in leaves
  ]
  place = {id(leaf): i for i, leaf in enumerate(marked)}
  wanted = [
    (slot, _path(path), leaf)
    for (slot, *_), tree in slots.slot_trees(treedef.unflatten(marked))
    for path, leaf in slots.slots_of_params(tree)
  ]
  slots_of: dict[str, list[str]] = {}
  for slot, path, _ in wanted:
    if slot != "averages":
      slots_of.setdefault(variable(path), []).append(slot)
  _check_slots({slot for of in slots_of.values() for slot in of})
  slot_variables = _slot_variables.find(
    variables.known, slots_of, name, more=_accumulates(opt_state)
  )
  for slot, path, leaf in wanted:
    what = f"The slot {slot!r} of {path!r}"
    if slot == "averages":
      known = variables.average(variable(path))
    else:
      known = slot_variables[variable(path)][1][slot]
    if is_per_replica(leaf):
      # The replicas' parts in the state of `sharded`.
      leaf, count = leaf.value, leaf.value.shape[0]
      whole = jax.ShapeDtypeStruct(shapes[path], leaf.dtype)
      value = parts.rows(variables.read(known, whole, what), count)
      if value.shape != leaf.shape:
        raise ValueError(
          f"{what} is in parts of the shape {leaf.shape[1:]}, but {count} replicas"
          f" have parts of {value.shape[1:]}: give a state that was made outside of"
          " maps."
        )
    else:
      value = variables.read(known, leaf, what)
    leaves[place[id(leaf)]] = value

  scopes = {form.scope for form, _ in slot_variables.values()}
  return treedef.unflatten(leaves), scopes


class _Variables:
  """The variables of a checkpoint, by their names.

  Attributes:
    known: their names.
  """

  def __init__(self, reader: Reader, variable: Callable[[str], str]) -> None:
    self._reader = reader
    self._variable = variable
    self.known = frozenset(reader.get_variable_to_shape_map())

  def read(self, name: str, like: Any, what: str) -> jax.Array:
    """Returns a variable, an array like ``like``.

    Raises:
      KeyError: if there is none of this name.
      ValueError: if it has another shape.
    """
    if name not in self.known:
      raise KeyError(
        f"{what} should be the variable {name!r}, which the checkpoint"
        f" has not; it has {sorted(self.known)}. `variable=` gives other names."
      )
    value = np.asarray(self._reader.get_tensor(name))
    if value.shape != like.shape:
      raise ValueError(
        f"{what} has the shape {like.shape}, but the variable"
        f" {name!r} {value.shape}"
      )
    return jnp.asarray(value, like.dtype)

  def average(self, variable: str) -> str:
    """Returns the name of a variable's moving average."""
    names = _slot_variables.averages(self.known, variable)
    if len(names) > 1:
      raise KeyError(
        f"The checkpoint has several moving averages of {variable!r},"
        f" {sorted(names)}: give a reader that has one of them."
      )
    return names[0] if names else f"{variable}/{_slot_variables.AVERAGE}"

  def scalar(self, name: str, scopes: set[str], like: Any) -> Any:
    """Returns a scalar of the optimizer, which may have been made in a scope.

    Args:
      name: such as "beta1_power".
      scopes: the scopes of the slots; a scalar may be in a scope within them.
      like: the scalar's type; None for a scalar that may be missing.

    Raises:
      KeyError: if there is none, or several.
    """
    # The scalar may be in another scope than the parameters, and `variable` may know
    # only the names of parameters.
    try:
      mapped = self._variable(name)
    except (LookupError, ValueError):
      mapped = name
    names = [x for x in (mapped, name) if x in self.known][:1]
    if not names:
      names = [x for x in self.known if x.endswith(f"/{name}")]
      near = [x for x in names if x.startswith(tuple(scopes))]
      names = near if len(near) == 1 else names
    if like is None and len(names) != 1:
      return None
    if len(names) > 1:
      raise KeyError(
        f"The scalar {name!r} is in the checkpoint in several scopes,"
        f" {sorted(names)}: map it with `variable=`."
      )
    like = np.zeros((), np.int32) if like is None else like
    return self.read((names or [name])[0], like, f"The scalar {name!r}")

  def step(self, updates: Any) -> int:
    """Returns the global step, or Keras's ``updates`` if there is none."""
    like = np.zeros((), np.int32)
    step = self.scalar("global_step", set(), None)
    if step is None and updates is None:
      try:
        step = self.scalar("global_step", set(), like)
      except KeyError as error:
        raise KeyError(
          f"{error.args[0]} `global_step=` gives the step itself."
        ) from error
    return int(updates if step is None else step)


def _path(path: Any) -> str:
  return "/".join(slots.path_keys(path))


def _check_slots(names: set[str]) -> None:
  unknown = sorted(names - set(_slot_variables.ORDER))
  if unknown:
    raise ValueError(
      f"TensorFlow has no optimizer with the slots {unknown}, so they are in no"
      " checkpoint of it. To read the parameters and the step alone, pass () for the"
      " state, and start the optimizer anew with init(params)."
    )


def _accumulates(opt_state: Any) -> bool:
  """Whether a state sums gradients of several steps, as some do in a slot."""
  is_multi_steps = lambda x: isinstance(x, optax.MultiStepsState)
  return any(
    map(is_multi_steps, jax.tree.leaves(opt_state, is_leaf=is_multi_steps))
  )


def _reader(checkpoint: Any) -> Reader:
  if not isinstance(checkpoint, str | os.PathLike):
    methods = ("get_variable_to_shape_map", "get_tensor")
    if not all(callable(getattr(checkpoint, m, None)) for m in methods):
      raise ValueError(
        "`checkpoint` must be a path, or an object with"
        f" `get_variable_to_shape_map` and `get_tensor`, got {checkpoint!r:.100}."
      )
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
