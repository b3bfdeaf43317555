"""Reads RETURNN's options as RETURNN does: 0, False, None or "0" mean off."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np


class Options:
  """The options of a RETURNN configuration, by name.

  RETURNN reads a number from a number or its text, and tests what it has read
  with ``if``. So an option is off if it is missing, ``None``, ``False`` or 0.
  """

  def __init__(self, config: Mapping[str, Any]):
    """Reads from a mapping, such as the variables of a configuration file."""
    self._config = config

  def get(self, name: str, default: Any = None) -> Any:
    """The option as it is."""
    value = self._config.get(name)
    return default if value is None else value

  def __contains__(self, name: str) -> bool:
    return name in self._config

  def number(self, name: str, default: float = 0.0) -> float:
    """A number, or its text."""
    value = self.get(name, default)
    try:
      if not isinstance(value, str | int | float | np.generic):
        raise ValueError
      number = float(value)
    except ValueError:
      raise ValueError(f"{name} must be a number, got {value!r}") from None
    if math.isnan(number):
      raise ValueError(f"{name} must be a number, got {value!r}")
    return number

  def limit(self, name: str) -> float:
    """A number that is positive or, for off, 0."""
    number = self.number(name)
    if number < 0:
      raise ValueError(f"{name} must be positive, or 0 for off, got {number}")
    return number

  def whole(self, name: str, default: int = 0) -> int:
    """A whole number."""
    number = self.number(name, default)
    if number != int(number):
      raise ValueError(f"{name} must be a whole number, got {number}")
    return int(number)

  def flag(self, name: str) -> bool:
    """Whether an option is on."""
    value = self.get(name, False)
    if isinstance(value, str):
      words = {"": False, "0": False, "false": False, "no": False, "off": False}
      words |= {"1": True, "true": True, "yes": True, "on": True}
      if value.lower() not in words:
        raise ValueError(f"{name} must be true or false, got {value!r}")
      return words[value.lower()]
    if not isinstance(value, bool | int | np.bool_):
      raise ValueError(f"{name} must be true or false, got {value!r}")
    return bool(value)

  def is_on(self, name: str) -> bool:
    """Whether an option of any type is on."""
    value = self.get(name)
    if isinstance(value, str):
      return value.lower() not in ("", "0", "0.0", "false", "none", "no", "off")
    return bool(np.any(value)) if isinstance(value, np.ndarray) else bool(value)
