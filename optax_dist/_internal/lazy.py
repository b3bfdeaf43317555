"""Package attributes that are imported on first use.

A store process, `optax-dist watch` and `optax-dist launch` don't need JAX,
which takes seconds to import; lazy packages spare them that.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable
from typing import Any


def names(
  package: str,
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
  """Creates a package's `__getattr__` and `__dir__` (PEP 562).

  `__getattr__` imports, by name, what the package imports for type checkers: the
  block under `if TYPE_CHECKING`. Besides, it finds the modules of the package, so
  that `package.module` works without an import. `__dir__` lists only public names, the
  package's `__all__`.

  Args:
    package: the package's `__name__`. Its `__init__.py` is read at the first use of
      a name. No name that it takes from a module may be that of a module in the
      package, which would hide it after its import.
  """

  @functools.cache
  def module_of() -> dict[str, str]:
    source = pkgutil.get_data(package, "__init__.py") or b""
    (block,) = (x for x in ast.parse(source).body if isinstance(x, ast.If))
    return {
      name.name: statement.module
      for statement in block.body
      if isinstance(statement, ast.ImportFrom)
      and statement.module not in (None, package)
      for name in statement.names
    }

  def __getattr__(name: str) -> Any:
    if name in module_of():
      value = getattr(importlib.import_module(module_of()[name]), name)
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
