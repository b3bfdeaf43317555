"""Reads an optimizer's slots by TensorFlow's names, from any optax state.

A slot is a tree like the parameters in an optimizer's state, such as a momentum
or an accumulator. TensorFlow identifies it by a variable and a name.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist._internal import checks
from optax_dist._internal.placement.replica_blocks import (
  PerReplica,
  is_per_replica,
)

# TensorFlow's names for the states of stock optax transformations.
_NAMES: dict[type, dict[str, str]] = {
  optax.TraceState: {"trace": "momentum"},
  optax.ScaleByRssState: {"sum_of_squares": "accumulator"},
  optax.ScaleByRmsState: {"nu": "rms"},
  optax.ScaleByRStdDevState: {"nu": "rms", "mu": "mg"},
  optax.ScaleByAdamState: {"mu": "m", "nu": "v"},
  optax.ScaleByAmsgradState: {"mu": "m", "nu": "v", "nu_max": "v_hat"},
  optax.ScaleByAdaDeltaState: {"e_g": "accum", "e_x": "accum_update"},
}

# Fields of wrappers' states that are not slots.
_NOT_SLOTS = frozenset(
  {
    "hyperparams",
    "hyperparams_states",
    "scalars",
    "gradient_sum",
    "acc_grads",
    "pending_rate",
  }
)


def slot_names(state: optax.OptState) -> list[str]:
  """Lists the names of an optimizer's slots, as in TensorFlow.

  Args:
    state: State of any optax transformation, including chains and wrappers.
      Slots of replicas have a leading replica axis.

  Returns:
    The names, sorted: TensorFlow's if it has the transformation, otherwise the
    name of the state's field.

  Source: ``tf.compat.v1.train.Optimizer.get_slot_names``.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-3))
    >>> slot_names(optimizer.init({"w": jnp.zeros(3)}))
    ['m', 'v']
  """
  return sorted({names[0] for names, _ in slot_trees(state)})


def get_slot(
  state: optax.OptState,
  path: str | Sequence[Any],
  name: str,
) -> jax.Array:
  """Returns the slot of one parameter.

  Args:
    state: State of any optax transformation, including chains and wrappers.
    path: The parameter's path, as ``"layer/kernel"``, as a sequence of keys
      ``("layer", "kernel")`` or as JAX's key path.
    name: A name from :func:`slot_names`, or the name of the state's field.

  Returns:
    The slot, an array like the parameter. In a state of ``sharded`` it has the
    parts of all replicas, along a leading axis.

  Raises:
    KeyError: If the slot or the parameter does not exist; lists those that do.
    ValueError: If several slots match.

  Source: ``tf.compat.v1.train.Optimizer.get_slot``.

  Example:
    >>> import jax.numpy as jnp
    >>> state = optax.adagrad(0.1).init({"layer": {"kernel": jnp.zeros(2)}})
    >>> [f"{x:.1f}" for x in get_slot(state, "layer/kernel", "accumulator")]
    ['0.1', '0.1']
  """
  checks.kind("path", path, str | Sequence, "a parameter's path")
  checks.kind("name", name, str, "a slot's name")
  trees = [tree for names, tree in slot_trees(state) if name in names]
  if not trees:
    raise KeyError(
      f"no slot {name!r}: the state has {slot_names(state) or 'none'}"
    )
  leaves = [
    (path_keys(key_path), leaf)
    for tree in trees
    for key_path, leaf in slots_of_params(tree)
  ]
  known = sorted({"/".join(keys) for keys, _ in leaves})
  if isinstance(path, str):
    path = [key for key in path.split("/") if key]
  keys = path_keys(path)
  matches = [
    leaf.value if is_per_replica(leaf) else leaf
    for other, leaf in leaves
    if other == keys
  ]
  wanted = repr("/".join(keys))
  if not matches:
    raise KeyError(
      f"no parameter {wanted} with a slot {name!r}: there are {known}"
    )
  if len(matches) > 1:
    raise ValueError(
      f"the parameter {wanted} has {len(matches)} slots {name!r}: look in the part"
      " of the state that is meant"
    )
  return matches[0]


def slot_trees(state: Any) -> Iterator[tuple[tuple[str, ...], Any]]:
  """Yields the slots of a state: names, the preferred one first, and tree."""
  if isinstance(state, PerReplica):
    yield from slot_trees(state.value)
  elif _is_named_tuple(state):
    known = _NAMES.get(type(state), {})
    for field, value in zip(state._fields, state, strict=True):
      if field in _NOT_SLOTS:
        continue
      if field == "slots" and isinstance(value, dict):
        yield from (((name,), tree) for name, tree in value.items())
      elif field in known:
        yield (known[field], field), value
      elif _holds_states(value):
        yield from slot_trees(value)
      elif _is_like_parameters(value):
        yield (field,), value
  elif isinstance(state, dict):
    for value in state.values():
      yield from slot_trees(value)
  elif isinstance(state, list | tuple):
    for value in state:
      yield from slot_trees(value)


def slots_of_params(tree: Any) -> list[tuple[Any, Any]]:
  """Returns the slots in a tree, with the paths of their parameters.

  A slot is an array; or a ``PerReplica`` of one, with the replicas' parts.
  """
  return jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_per_replica)


def _is_named_tuple(value: Any) -> bool:
  return isinstance(value, tuple) and hasattr(value, "_fields")


def _holds_states(value: Any) -> bool:
  """Distinguishes states (and tuples and dicts of states) from trees of arrays.

  A state is a named tuple. Parameters may be in one too, but are unlikely to be
  in one whose name ends in "State".
  """
  if _is_named_tuple(value):
    kind = type(value)
    return kind is PerReplica or kind.__name__.endswith("State")
  if isinstance(value, dict):
    return bool(value) and any(map(_holds_states, value.values()))
  if isinstance(value, list | tuple):
    return any(map(_holds_states, value))
  return False


def _is_like_parameters(value: Any) -> bool:
  """Distinguishes trees of numbers from counters, flags and random keys."""
  leaves = jax.tree.leaves(value)
  return bool(leaves) and all(
    _is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)
    for leaf in leaves
  )


def _is_array(value: Any) -> bool:
  return isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct)


def path_keys(path: Sequence[Any]) -> tuple[str, ...]:
  """Converts a key path to plain strings."""
  return tuple(
    jax.tree_util.keystr((key,), simple=True)
    if type(key).__module__.startswith("jax")
    else str(key)
    for key in path
  )
