"""Lets ``flax.serialization`` save sparse slices, if Flax is in use."""

import sys
from typing import Any

_registered: set[type] = set()


def register(cls: type) -> None:
  """Registers a class of slices with Flax, if Flax has been imported.

  This does not import Flax: a program that saves states with Flax has done so
  by the time that it creates or maps slices.

  Args:
    cls: the class, with ``values`` and ``indices``, and its static
      ``dense_shape``.
  """
  if cls in _registered:
    return
  serialization: Any = sys.modules.get("flax.serialization")
  if not hasattr(serialization, "register_serialization_state"):
    return  # Not imported, or not completely.

  def to_state(slices: Any) -> dict[str, Any]:
    to_dict = serialization.to_state_dict
    return {name: to_dict(getattr(slices, name)) for name in _ARRAYS}

  def from_state(slices: Any, state: dict[str, Any]) -> Any:
    if state.keys() != set(_ARRAYS):
      raise ValueError(
        "The state of sparse slices must have the arrays 'values' and 'indices',"
        f" got {sorted(state)}."
      )
    arrays = [
      serialization.from_state_dict(getattr(slices, name), state[name], name)
      for name in _ARRAYS
    ]
    return cls.unchecked(*arrays, slices.dense_shape)  # type: ignore[attr-defined]

  serialization.register_serialization_state(cls, to_state, from_state)
  _registered.add(cls)


_ARRAYS = ("values", "indices")
