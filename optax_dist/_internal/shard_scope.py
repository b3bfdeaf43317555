"""Tells a transformation inside ``sharded`` that it gets parts of leaves.

``sharded`` passes flat parts of the leaves to its inner transformation, which
types don't show without tracked axes. This module records it during the call.
"""

import contextlib
import contextvars
from collections.abc import Iterator
from typing import NamedTuple

from optax_dist._internal import axes


class Scope(NamedTuple):
  """The context in which a transformation is called.

  Attributes:
    names: the axes over which all leaves are one replica's parts; usually none.
    is_inspection: whether this trace is only inspected, so that it may not communicate.
  """

  names: tuple[axes.AxisName, ...] = ()
  is_inspection: bool = False


_NO_PARTS = Scope()
_scope = contextvars.ContextVar("scope of shards", default=_NO_PARTS)


@contextlib.contextmanager
def inside(scope: Scope) -> Iterator[None]:
  """Sets what transformations inside get."""
  token = _scope.set(scope)
  try:
    yield
  finally:
    _scope.reset(token)


def current() -> Scope:
  """Returns what this transformation gets."""
  return _scope.get()
