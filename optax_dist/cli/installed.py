"""Checks for packages that a command needs in addition to the library."""

import importlib.util

from optax_dist.cli import errors

# Modules with another name than their package.
_NAMES = {"sklearn": "scikit-learn"}


def check(*modules: str) -> None:
  """Raises an error if packages for output, or these modules, are missing.

  Args:
    modules: further modules.

  Raises:
    errors.CommandError: a module is missing.
  """
  missing = [
    _NAMES.get(module, module)
    for module in ("rich", "matplotlib", *modules)
    if importlib.util.find_spec(module) is None
  ]
  if missing:
    raise errors.CommandError(
      f"{', '.join(missing)} not installed; run: pip install"
      ' "optax-dist[train]"'
    )
