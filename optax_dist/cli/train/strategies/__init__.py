"""The strategies of ``optax-dist train``: each file here is one.

A file ``my_idea.py`` with a ``STRATEGY`` in it (see
:class:`optax_dist.cli.train.strategy.Strategy`) is ``--strategy my-idea``. It
is not listed anywhere else.
"""

import importlib
import pkgutil

from optax_dist.cli.train import strategy


def names() -> list[str]:
  """The names of all strategies, sorted; imports none of them.

  Example:
    >>> "cross-shard" in names()
    True
  """
  return sorted(
    module.name.replace("_", "-") for module in pkgutil.iter_modules(__path__)
  )


def load(name: str) -> strategy.Strategy:
  """The strategy with a name from :func:`names`."""
  module = importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
  return module.STRATEGY
