"""Error feedback of means: what rounding left out is added to the next mean."""

from __future__ import annotations

import numpy as np

from optax_dist.coordinator.aggregation import layout as layouts


class MeanFeedback:
  """The residuals of the means that one replica has rounded.

  The owner of a slice, which averages it, computes ``v = mean + residual``, sends
  ``C(v)``, which is `v` in few bits, to all replicas, and keeps the new residual
  ``v - C(v)``. If slices move because other replicas take part in a step, a residual
  waits until its replica averages the same numbers again. So the sum of all means
  that were sent, plus all residuals, is the sum of the true means.

  Only means of committed steps may change residuals; the caller of `keep` sees to
  that.

  Source: Tang et al. 2019, DoubleSqueeze, where one server owns all slices (only the
  abstract was available to us); the decay is that of Sarfi et al. 2025, SparseLoCo.

  Example:
    >>> place = layouts.layout([np.zeros(4, np.float32)], "int4")
    >>> feedback = MeanFeedback(place, decay=0.5)
    >>> feedback.keep(2, np.array([4.0, 8.0], np.float32))
    >>> feedback.owed(1, 4)
    array([0., 2., 4.], dtype=float32)
    >>> feedback.lose(0, 3)
    >>> feedback.owed(1, 4)
    array([0., 0., 4.], dtype=float32)
  """

  def __init__(
    self,
    place: layouts.Layout,
    decay: float = 1.0,
  ):
    """Creates it, without residuals.

    Args:
      place: the layout of gradients.
      decay: the share of a residual that is added to the next mean, from 0 to 1.
    """
    self._elements, self._decay = place.elements, np.float32(decay)
    # Pages that were never written take up no memory.
    self._kept = np.zeros(self._elements, np.float32)

  def owed(self, start: int, stop: int) -> np.ndarray:
    """The residual to add to a mean: float32, a copy.

    Args:
      start: the first element.
      stop: the element after the last.
    """
    return self._kept[start:stop] * self._decay

  def keep(self, start: int, left_out: np.ndarray) -> None:
    """Keeps what a committed mean left out.

    Args:
      start: the first element.
      left_out: float32.
    """
    self._kept[start : start + left_out.size] = left_out

  def lose(self, start: int, stop: int) -> None:
    """Drops the residual of these numbers, which might be added a second time."""
    self._kept[start:stop] = 0.0

  def clear(self) -> None:
    """Drops all residuals."""
    self._kept = np.zeros(self._elements, np.float32)
