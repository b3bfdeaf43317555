"""Hyperparameters in an optimizer's state that all replicas change together.

They are hyperparameters of `optax.inject_hyperparams` that follow no schedule: an
update would set those of a schedule again. A name may occur several times, as in groups
of an `optax.partition`.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import DictKey, GetAttrKey

# All values of each name in a state, in the order of the state's leaves.
Values = dict[str, tuple[Any, ...]]


def find(state: Any) -> Values:
  """The hyperparameters that can be set in a state.

  Example:
    >>> import optax
    >>> sgd = optax.inject_hyperparams(optax.sgd)
    >>> find(sgd(0.5, momentum=lambda step: 0.9).init(np.zeros(3)))
    {'learning_rate': (Array(0.5, dtype=float32),)}
  """
  leaves = jax.tree.leaves(state)
  return {
    name: tuple(leaves[i] for i in where)
    for name, where in _positions(state).items()
  }


def put(state: Any, values: Values) -> Any:
  """A state with these values, as `find` returned them for one like it."""
  if not values:
    return state
  leaves, tree = jax.tree.flatten(state)
  for name, where in _positions(state).items():
    for i, value in zip(where, values[name], strict=True):
      leaves[i] = value
  return jax.tree.unflatten(tree, leaves)


def changed(values: Values, changes: Mapping[str, float]) -> Values:
  """The values with some set to a number; names that are not there are ignored."""
  return {
    name: tuple(_filled(x, changes[name]) for x in old)
    if name in changes
    else old
    for name, old in values.items()
  }


def change(shared: Any, changes: Mapping[str, float]) -> Any:
  """A `SharedState` with some hyperparameters set to a number."""
  opt_state, own = shared.opt_state, shared.hyperparams
  return shared._replace(
    opt_state=put(opt_state, changed(find(opt_state), changes)),
    hyperparams=changed(own, changes) if own else own,
  )


def check(shared: Any, values: Mapping[str, float]) -> None:
  """Checks what `Replica.set_hyperparams` is given, with a `SharedState`.

  Raises:
    ValueError: see there.
  """
  own = find(shared.opt_state)
  known = dict(shared.hyperparams)
  for name, arrays in own.items():
    known[name] = (*known.get(name, ()), *arrays)
  for name, value in values.items():
    if name not in known:
      raise ValueError(
        f"set_hyperparams({name}=...) needs a number that the optimizer has in its"
        f" state; it has {', '.join(sorted(known)) or 'none'}. Give it as one, and"
        f" not as a schedule: optax.inject_hyperparams(optax.sgd)({name}=0.1)."
      )
    for array in known[name]:
      if np.shape(array):
        raise ValueError(
          f"set_hyperparams({name}=...) is for single numbers, and {name} is"
          f" {array.dtype}{list(array.shape)}."
        )
      number = math.nan  # Stays so if the value is no number.
      with (
        contextlib.suppress(TypeError, ValueError),
        np.errstate(over="ignore", invalid="ignore"),
      ):
        number = float(np.asarray(float(value)).astype(array.dtype))
      whole = not jnp.issubdtype(array.dtype, jnp.floating)
      if not np.isfinite(number) or (whole and number != value):
        raise ValueError(
          f"{name} must be a finite {array.dtype}, got {value!r}."
        )


def _positions(state: Any) -> dict[str, list[int]]:
  """Which leaves of a state are which hyperparameter."""
  paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(state)]
  names, scheduled = map(GetAttrKey, ("hyperparams", "hyperparams_states"))
  follows = {
    (*path[:i], path[i + 1])
    for path in paths
    for i, key in enumerate(path[:-1])
    if key == scheduled
  }
  numbers: dict[str, list[int]] = {}
  for number, path in enumerate(paths):
    if path[-2:-1] != (names,) or not isinstance(path[-1], DictKey):
      continue
    if (*path[:-2], path[-1]) not in follows:
      numbers.setdefault(path[-1].key, []).append(number)
  return numbers


def _filled(leaf: Any, value: float) -> Any:
  """An array like a leaf, full of a number."""
  new = np.full(np.shape(leaf), value, leaf.dtype)
  if not isinstance(leaf, jax.Array):
    return new
  if not leaf.is_fully_addressable:
    return jax.make_array_from_callback(
      new.shape, leaf.sharding, lambda index: new[index]
    )
  return jax.device_put(new, leaf.sharding if leaf.committed else None)
