"""Of which states a replica takes fingerprints, and which of these still count."""

from __future__ import annotations


class Fingerprints:
  """Fingerprints of the run's states; taking one lasts a while.

  Attributes:
    every: steps between two; 0 for none.

  Example:
    >>> prints = Fingerprints(every=10)
    >>> prints.is_due(9), prints.is_due(10), prints.counts(10)
    (False, True, True)
    >>> prints.forget()  # The run begins again, and gets to step 10 once more.
    >>> prints.counts(10), prints.counts(20)
    (False, True)
  """

  def __init__(self, every: int):
    """Starts without any."""
    self.every = every
    # The last step of which one was taken, and the last one that may be of a state
    # that was not the run's, or is not any more.
    self._last = self._void = -1

  def is_due(self, step: int) -> bool:
    """Whether to take one now; the state is that of a step."""
    due = step % self.every == 0
    if due:
      self._last = step
    return due

  def counts(self, step: int) -> bool:
    """Whether one of this step is of a state that the run has."""
    return step > self._void

  def forget(self) -> None:
    """Those that were begun count no more."""
    self._void = self._last
