"""Tells a transformation inside ``sharded`` that it gets parts of leaves.

``sharded`` passes flat parts of the leaves to its inner transformation, which
types don't show without tracked axes. This module records it during the call.
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
  """Marks every leaf inside as one replica's part of it, over ``names``."""
  token = _axes.set(names)
  try:
    yield
  finally:
    _axes.reset(token)


@contextlib.contextmanager
def dry_run() -> Iterator[None]:
  """Marks the trace inside as inspection only: nothing may communicate."""
  token = _dry.set(True)
  try:
    yield
  finally:
    _dry.reset(token)


def names() -> tuple[axes.AxisName, ...]:
  """Returns the axes over which all leaves are parts; usually none."""
  return _axes.get()


def is_dry_run() -> bool:
  """Whether this trace is for inspection only."""
  return _dry.get()
