"""Threads of a replica, which compute in the precision of the training loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax
import numpy as np

T = TypeVar("T")


def in_this_precision(target: Callable[..., T]) -> Callable[..., T]:
  """Makes another thread use float64 if and only if this one does.

  `with jax.enable_x64(True)` holds for its own thread only. An update that
  another thread computes would be rounded to float32.

  Args:
    target: the function that the other thread runs.

  Example:
    >>> with jax.enable_x64(True):
    ...   wide = in_this_precision(lambda: jax.numpy.ones(()).dtype)
    >>> wide()
    dtype('float64')
  """
  wide = jax.dtypes.canonicalize_dtype(np.float64) == np.float64

  def run(*args: object) -> T:
    with jax.enable_x64(wide):
      return target(*args)

  return run
