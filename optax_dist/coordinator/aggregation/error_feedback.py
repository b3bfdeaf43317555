"""Error feedback: the unsent residual is added to the next contribution."""

from __future__ import annotations

import numpy as np


class ErrorFeedback:
  """The unsent residual of a replica's contributions.

  It changes only by contributions that are known to count:

  * a contribution that was applied: its residual replaces the previous one;
  * one that was dropped, or failed: nothing changes, because the residual sent
  with it has not arrived;
  * one with an unknown outcome (the replica was declared lost meanwhile): the
  residual is dropped, because it might be added twice.

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
    """Starts without a residual.

    Args:
      decay: the share of the residual added to the next contribution, from 0 to
        1.
    """
    self._decay = np.float32(decay)
    self._kept: np.ndarray | None = None
    # The residual of each contribution whose outcome is unknown, if it counts.
    self._under_way: dict[int, np.ndarray] = {}

  def owed(self, size: int) -> np.ndarray:
    """The residual to add to the next contribution: float32, a copy.

    Args:
      size: number of elements.
    """
    if self._kept is None:
      return np.zeros(size, np.float32)
    return self._kept * self._decay

  def left_out(self, kept: np.ndarray, number: int, extends: int = -1) -> None:
    """Sets the residual that is kept if a contribution counts.

    Args:
      kept: float32, like the result of `owed`.
      number: number of the contribution.
      extends: an earlier contribution that it includes, and that may have a
        separate outcome; all others are obsolete.
    """
    earlier = self._under_way.get(extends)
    self._under_way = {} if earlier is None else {extends: earlier}
    self._under_way[number] = kept

  def settle(self, number: int, applied: bool | None) -> None:
    """Handles the outcome of a contribution.

    Args:
      number: number of the contribution.
      applied: whether it counts; None if unknown.
    """
    kept = self._under_way.pop(number, None)
    if kept is None or applied is False:
      return
    self._kept = kept if applied else None
    # Contributions that it extends, or that extend it, are obsolete.
    self._under_way = {}

  def lose(self) -> None:
    """Drops the residual if a contribution has no outcome."""
    for number in [*self._under_way]:
      self.settle(number, None)
