"""Which states a replica takes fingerprints of, and which fingerprints still count."""

from __future__ import annotations


class Fingerprints:
  """Fingerprints of the run's states, each of which takes a while.

  Attributes:
    every: steps between two fingerprints; 0 for none.

  Example:
    >>> prints = Fingerprints(every=10)
    >>> prints.is_due(9), prints.is_due(10), prints.counts(10)
    (False, True, True)
    >>> prints.forget()  # The run begins again, and gets to step 10 once more.
    >>> prints.counts(10), prints.counts(20)
    (False, True)
  """

  def __init__(self, every: int):
    """Starts before any was taken."""
    self.every = every
    # The step of the last fingerprint, and the last step whose fingerprint is void: its
    # state was, or may be, no state of the run.
    self._last = self._void = -1

  def is_due(self, step: int) -> bool:
    """Whether to take a fingerprint of the state of a step."""
    due = step % self.every == 0
    if due:
      self._last = step
    return due

  def counts(self, step: int) -> bool:
    """Whether a fingerprint of this step is that of a state of the run."""
    return step > self._void

  def forget(self) -> None:
    """Voids all fingerprints that have been begun."""
    self._void = self._last
