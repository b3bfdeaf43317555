"""What a transformation inside of ``sharded`` needs to know of it.

``sharded`` hands its inner transformation flat parts of the leaves, which no type
shows where JAX tracks nothing. While it calls it, this file says so.
"""

import contextlib
import contextvars
from collections.abc import Iterator

from optax_dist._internal import axes

_axes: contextvars.ContextVar[tuple[axes.AxisName, ...]] = (
  contextvars.ContextVar("axes of shards", default=())
)
_dry: contextvars.ContextVar[bool] = contextvars.ContextVar(
  "no axis is bound", default=False
)


@contextlib.contextmanager
def over(names: tuple[axes.AxisName, ...]) -> Iterator[None]:
  """Every leaf that is seen inside is one replica's part of it, along ``names``."""
  token = _axes.set(names)
  try:
    yield
  finally:
    _axes.reset(token)


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
  """What is traced inside is looked at only: nothing may communicate."""
  token = _dry.set(True)
  try:
    yield
  finally:
    _dry.reset(token)


def names() -> tuple[axes.AxisName, ...]:
  """Returns the axes along which all leaves are parts here; none mostly."""
  return _axes.get()


def is_dry_run() -> bool:
  """Whether this trace is for looking at only."""
  return _dry.get()
