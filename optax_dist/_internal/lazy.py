"""Names of a package that are imported when they are asked for.

A store process, `optax-dist watch` and `optax-dist launch` need no JAX, which
takes seconds to import; a package whose names are lazy lets them do without.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Mapping
from typing import Any


def names(
  package: str, where: Mapping[str, tuple[str, ...]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
  """Makes a package's `__getattr__` and `__dir__` (PEP 562).

  Besides the names in `where`, they know the modules in the package, so that
  `package.module` needs no import of its own.

  Args:
    package: the package's `__name__`.
    where: by each module's full name, the names that the package has from it.
      None may be that of a module in the package, which would hide it once that
      is imported.
  """
  module_of = {name: module for module, all in where.items() for name in all}

  def __getattr__(name: str) -> Any:
    if name in module_of:
      value = getattr(importlib.import_module(module_of[name]), name)
    elif not name.startswith("_") and importlib.util.find_spec(
      f"{package}.{name}"
    ):
      value = importlib.import_module(f"{package}.{name}")
    else:
      raise AttributeError(f"module {package!r} has no attribute {name!r}")
    setattr(sys.modules[package], name, value)
    return value

  def __dir__() -> list[str]:
    return sorted({*vars(sys.modules[package]), *module_of})

  return __getattr__, __dir__
