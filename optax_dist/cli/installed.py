"""What a command needs that the library alone does not."""

import importlib.util

from optax_dist.cli import errors

# What is imported by another name than the one it is installed by.
_NAMES = {"sklearn": "scikit-learn"}


def check(*modules: str) -> None:
  """Raises an error if what prints and draws is not there, or one of these.

  Args:
    modules: what else is needed.

  Raises:
    errors.CommandError: something is missing.
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
