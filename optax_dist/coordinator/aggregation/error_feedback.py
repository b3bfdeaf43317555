"""Error feedback: the unsent residual is added to the next contribution."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class _UnderWay(NamedTuple):
  """A contribution whose outcome is unknown.

  Attributes:
    part: the part of the parameters.
    kept: the residual of that part if it counts.
  """

  part: int
  kept: np.ndarray


class ErrorFeedback:
  """The unsent residual of each part of the parameters.

  It changes only by contributions that are known to count:

  * a contribution that was applied: its residual replaces the previous one;
  * one that was dropped, or failed: nothing changes, because the residual sent
  with it has not arrived;
  * one with an unknown outcome (the replica was declared lost meanwhile): the
  residual of its part is dropped, because it might be added twice.

  Source: Seide et al. 2014, 1-Bit Stochastic Gradient Descent; the decay is
    that of Sarfi et al. 2025, SparseLoCo.

  Example:
    >>> feedback = ErrorFeedback(decay=0.5)
    >>> feedback.left_out(np.array([4.0], np.float32), number=0)
    >>> feedback.owed(size=1)  # The outcome isn't known yet.
    array([0.], dtype=float32)
    >>> feedback.settle(number=0, applied=True)
    >>> feedback.owed(size=1)
    array([2.], dtype=float32)
  """

  def __init__(self, decay: float = 1.0):
    """Starts without residuals.

    Args:
      decay: the share of the residual added to the next contribution, from 0 to
        1.
    """
    self._decay = np.float32(decay)
    self._kept: dict[int, np.ndarray] = {}
    self._under_way: dict[int, _UnderWay] = {}

  def owed(self, size: int, part: int = 0) -> np.ndarray:
    """The residual to add to the next contribution: float32, a copy.

    Args:
      size: number of elements of the part.
      part: the part.
    """
    if part not in self._kept:
      return np.zeros(size, np.float32)
    return self._kept[part] * self._decay

  def left_out(
    self, kept: np.ndarray, number: int, part: int = 0, extends: int = -1
  ) -> None:
    """Sets the residual that is kept if a contribution counts.

    Args:
      kept: float32, like the result of `owed`.
      number: number of the contribution.
      part: its part of the parameters.
      extends: an earlier contribution that it includes, and that may have a
        separate outcome; all others of the part are obsolete.
    """
    self._under_way = {
      n: one
      for n, one in self._under_way.items()
      if n == extends or one.part != part
    }
    self._under_way[number] = _UnderWay(part, kept)

  def settle(self, number: int, applied: bool | None) -> None:
    """Handles the outcome of a contribution.

    Args:
      number: number of the contribution.
      applied: whether it counts; None if unknown.
    """
    one = self._under_way.pop(number, None)
    if one is None or applied is False:
      return
    if applied:
      self._kept[one.part] = one.kept
    else:
      self._kept.pop(one.part, None)
    # Contributions that it extends, or that extend it, are obsolete.
    self._under_way = {
      n: other for n, other in self._under_way.items() if other.part != one.part
    }

  def lose(self) -> None:
    """Drops the residuals of all contributions without an outcome."""
    for number in [*self._under_way]:
      self.settle(number, None)
