"""Error feedback: what few bits leave out is added to what is sent next."""

from __future__ import annotations

import numpy as np


class ErrorFeedback:
  """The residual of what one replica sends: of its gradients, or of its means.

  Whoever sends computes ``v = numbers + residual``, sends ``C(v)``, which is `v` in
  few bits, and keeps the new residual ``v - C(v)``. For means that is the owner of a
  slice, which averages it. If slices move because other replicas take part in a step,
  a residual waits until its replica averages the same numbers again. So the sum of
  all that was sent, plus all residuals, is the sum of the true numbers.

  Only what counts may change residuals; the caller of `keep` sees to that.

  Source: Seide et al. 2014, 1-Bit Stochastic Gradient Descent, for gradients; Tang et
  al. 2019, DoubleSqueeze, for means, where one server owns all slices (only the
  abstract was available to us); the decay is that of Sarfi et al. 2025, SparseLoCo.

  Example:
    >>> feedback = ErrorFeedback(4, decay=0.5)
    >>> feedback.keep(np.array([4.0, 8.0], np.float32), start=2)
    >>> feedback.residual(1, 4)
    array([0., 2., 4.], dtype=float32)
    >>> feedback.drop(0, 3)
    >>> feedback.residual(1, 4)
    array([0., 0., 4.], dtype=float32)
  """

  def __init__(self, size: int, decay: float = 1.0):
    """Starts without residuals.

    Args:
      size: how many numbers there are.
      decay: the share of a residual that is added, from 0 to 1.
    """
    self._size, self._decay = size, np.float32(decay)
    self.clear()

  def residual(self, start: int, stop: int) -> np.ndarray:
    """The residual to add: float32, a copy.

    Args:
      start: the first number.
      stop: the number after the last.
    """
    return self._kept[start:stop] * self._decay

  def keep(self, left_out: np.ndarray, start: int) -> None:
    """Keeps what was left out of numbers that count.

    Args:
      left_out: float32.
      start: the first number.
    """
    self._kept[start : start + left_out.size] = left_out

  def drop(self, start: int, stop: int) -> None:
    """Drops the residual of these numbers, which might be added a second time."""
    self._kept[start:stop] = 0.0

  def clear(self) -> None:
    """Drops all residuals."""
    # Pages that were never written take up no memory.
    self._kept = np.zeros(self._size, np.float32)
