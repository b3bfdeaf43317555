"""Package attributes that are imported on first use.

A store process, `optax-dist watch` and `optax-dist launch` don't need JAX,
which takes seconds to import; lazy packages spare them that.
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
  """Creates a package's `__getattr__` and `__dir__` (PEP 562).

  Besides the names in `where`, `__getattr__` finds the modules of the package,
  so that `package.module` works without an import. `__dir__` has what is public,
  the package's `__all__`, and nothing else.

  Args:
    package: the package's `__name__`.
    where: for each module's full name, the names that the package takes from
      it. None may be the name of a module in the package, which would hide it
      after its import.
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
    return sorted(vars(sys.modules[package])["__all__"])

  return __getattr__, __dir__
