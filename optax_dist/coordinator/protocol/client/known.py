"""What a replica knows of its run: all that its coordinators have said."""

from __future__ import annotations

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Process,
  Start,
)
from optax_dist.coordinator.protocol.history import after
from optax_dist.coordinator.protocol.messages import Welcome


class Known:
  """How far the run is, and what it has begun from.

  Attributes:
    epoch: of the last coordinator that has welcomed it; -1 for none.
    beginnings: how often the run had begun by then.
    read: how many steps there are.
    progress: the samples in these, if samples are leased.
    offered: the state that it has offered with its last call.
    origin: the state that the run has begun from.
  """

  def __init__(
    self, process: Process, start: Start, has_data: bool, out: list[Effect]
  ):
    """Starts before any coordinator has said anything.

    Args:
      process: the replica's.
      start: the state that it starts with.
      has_data: whether samples are leased.
      out: the list to which effects are appended.
    """
    self._process, self._has_data, self._out = process, has_data, out
    self.epoch, self.beginnings = -1, 0
    self.read, self.progress = start.step, start.progress
    # The samples in the steps since its state.
    self._progress_at = {start.step: start.progress}
    self.offered = self.origin = start

  def offer(self, start: Start | None, step: int) -> Start:
    """The replica's state, from which a run may begin that has lost all others.

    Args:
      start: the start state that it is; None if it is a later one.
      step: its step.
    """
    if start is None:
      progress = self._progress_at.get(step, self.progress)
      digest = f"{self._process} at step {step}"
      start = Start(step, digest, progress, self.origin.lineage)
    self.offered = start
    return start

  def welcomed(self, welcome: Welcome) -> None:
    """A coordinator says how far the run is."""
    self.epoch, self.beginnings = welcome.epoch, welcome.beginnings
    self.read, self.progress = welcome.step, welcome.progress
    self._tell_progress()

  def committed(self, commit: Committed, applied: int) -> None:
    """A step is committed; the replica's state has so many."""
    self.read += 1
    if self._has_data:
      self.progress = after(self.progress, commit)
      self._progress_at[self.read] = self.progress
      for step in [s for s in self._progress_at if s < applied]:
        del self._progress_at[step]
    self._tell_progress()

  def _tell_progress(self) -> None:
    if self._has_data:
      self._out.append(fx.Progressed(self.read, self.progress))
