"""Optional parts of the coordinator: nothing imports them before they are used.

Each lies in a package of `extras`. It imports what it extends, which knows only
a name: of a store's URL.
"""

from __future__ import annotations

import importlib
import importlib.util
from types import ModuleType

_EXTRAS = "optax_dist.coordinator.extras"


def load(name: str) -> ModuleType | None:
  """Imports an optional part, which may register itself then.

  Args:
    name: of its module in `extras`, such as ``etcd``.

  Returns:
    The module; None if there is none of this name.

  Example:
    >>> load("no_such_part") is None
    True
  """
  if not all(part.isidentifier() for part in name.split(".")):
    return None
  if importlib.util.find_spec(f"{_EXTRAS}.{name}") is None:
    return None
  return importlib.import_module(f"{_EXTRAS}.{name}")
