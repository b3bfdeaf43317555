"""What a replica has not sent yet: kept, and added to what it sends next."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class _UnderWay(NamedTuple):
  """A contribution whose outcome isn't known.

  Attributes:
    part: what it is of.
    kept: what is kept of that part if it counts.
  """

  part: int
  kept: np.ndarray


class ErrorFeedback:
  """What a replica has not sent yet, of each part of the parameters.

  It changes only by what is known to count:

  * a contribution that was applied: what it left out takes the place of what was
    kept;
  * one that was dropped, or failed: nothing changes, as what was owed with it has
    not arrived;
  * one of which nobody knows (the replica was taken for lost meanwhile): nothing
    is kept of its part, as it might be added a second time.

  Source: Seide et al. 2014, 1-Bit Stochastic Gradient Descent; the decay is of
  Sarfi et al. 2025, SparseLoCo.

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
    """Makes one that keeps nothing so far.

    Args:
      decay: what of it is added to the next contribution, from 0 to 1.
    """
    self._decay = np.float32(decay)
    self._kept: dict[int, np.ndarray] = {}
    self._under_way: dict[int, _UnderWay] = {}

  def owed(self, size: int, part: int = 0) -> np.ndarray:
    """What is to be added to the next contribution: float32, a copy.

    Args:
      size: how many numbers the part has.
      part: which one.
    """
    if part not in self._kept:
      return np.zeros(size, np.float32)
    return self._kept[part] * self._decay

  def left_out(
    self, kept: np.ndarray, number: int, part: int = 0, extends: int = -1
  ) -> None:
    """Says what is kept if a contribution counts.

    Args:
      kept: float32, like what `owed` gave.
      number: of the contribution.
      part: what it is of.
      extends: an earlier one that it contains, and that may have an outcome of
        its own; all others of the part are out of question now.
    """
    self._under_way = {
      n: one
      for n, one in self._under_way.items()
      if n == extends or one.part != part
    }
    self._under_way[number] = _UnderWay(part, kept)

  def settle(self, number: int, applied: bool | None) -> None:
    """Says what became of a contribution.

    Args:
      number: of the contribution.
      applied: whether it counts; None: nobody knows.
    """
    one = self._under_way.pop(number, None)
    if one is None or applied is False:
      return
    if applied:
      self._kept[one.part] = one.kept
    else:
      self._kept.pop(one.part, None)
    # What it extends, or what extends it, is out of question.
    self._under_way = {
      n: other for n, other in self._under_way.items() if other.part != one.part
    }

  def lose(self) -> None:
    """Nobody knows what became of all that is under way."""
    for number in [*self._under_way]:
      self.settle(number, None)
