"""What the owner of a slice left out of its means, added to its next ones."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from optax_dist.coordinator.aggregation import layout as layouts


class MeanFeedback:
  """What one replica left out of the means that it made.

  Whoever averages a slice has the numbers ``v = mean + kept``, tells all
  ``C(v)``, which is `v` in few bits, and keeps ``v - C(v)``. A replica keeps what is
  of the slices that it averaged last; where slices move, as others take part in a
  step, that waits until it averages the same numbers again. So the sum of all
  means that were told, and of what the replicas keep, is the sum of the true ones.

  Only means that count may change what is kept: whoever calls `keep` knows.

  Source: Tang et al. 2019, DoubleSqueeze, where one server has all slices (its
  abstract; we could not read the full text); the decay is of Sarfi et al. 2025,
  SparseLoCo.

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
    fragments: Sequence[Sequence[int]] | None = None,
  ):
    """Makes one that keeps nothing so far.

    Args:
      place: the layout of gradients.
      decay: what of it is added to the next mean, from 0 to 1.
      fragments: of those that take turns with the steps, how many numbers of each
        leaf are read; None: each step is of all numbers.
    """
    self._elements, self._decay = place.elements, np.float32(decay)
    self._gaps = [place.gaps()]
    if fragments is not None:
      self._gaps = [place.gaps(sizes) for sizes in fragments]
    # By fragment. Memory that was never written to takes up no room.
    self._kept: dict[int, np.ndarray] = {}

  def gaps(self, step: int = 0) -> tuple[tuple[int, int], ...]:
    """Where a mean has no numbers that anybody reads; see `Layout.gaps`."""
    return self._gaps[self._fragment(step)]

  def owed(self, start: int, stop: int, step: int = 0) -> np.ndarray:
    """What is to be added to a mean: float32, a copy.

    Args:
      start: the first element.
      stop: the element after the last.
      step: of the mean.
    """
    kept = self._kept.get(self._fragment(step))
    if kept is None:
      return np.zeros(stop - start, np.float32)
    return kept[start:stop] * self._decay

  def keep(self, start: int, left_out: np.ndarray, step: int = 0) -> None:
    """Says what a mean left out that counts.

    Args:
      start: the first element.
      left_out: float32.
      step: of the mean.
    """
    fragment = self._fragment(step)
    if fragment not in self._kept:
      self._kept[fragment] = np.zeros(self._elements, np.float32)
    self._kept[fragment][start : start + left_out.size] = left_out

  def lose(self, start: int, stop: int, step: int = 0) -> None:
    """Keeps nothing of these numbers, as it might be added a second time."""
    kept = self._kept.get(self._fragment(step))
    if kept is not None:
      kept[start:stop] = 0.0

  def clear(self) -> None:
    """Keeps nothing."""
    self._kept.clear()

  def _fragment(self, step: int) -> int:
    return step % len(self._gaps)
