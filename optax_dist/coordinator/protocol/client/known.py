"""What a replica knows of its run: all that its coordinators have said."""

from __future__ import annotations

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import Committed, Process, Start
from optax_dist.coordinator.protocol.history import after
from optax_dist.coordinator.protocol.messages import Welcome


class Known:
  """How far the run is, and what it has begun from.

  Attributes:
    epoch: of the last coordinator that has welcomed it; -1 for none.
    beginnings: how often the run had begun by then.
    read: how many steps there are.
    progress: the samples in these, if samples are leased.
    lineage: the runs that it continues.
    compute: the seconds that its last gradient took; 0 if unknown.
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
    self.lineage = start.lineage
    # The samples in the steps since its state.
    self._progress_at = {start.step: start.progress}
    # When it got to know of the last step.
    self._read_at, self.compute = 0.0, 0.0
    # When the step is expected to end that it has joined amid; None if that step
    # waits for this replica.
    self._ends: float | None = None

  def offer(self, step: int) -> Start:
    """A state from which the run may begin that has lost all others.

    Args:
      step: its step, after the replica's first one.
    """
    progress = self._progress_at.get(step, self.progress)
    digest = f"{self._process} at step {step}"
    return Start(step, digest, progress, self.lineage)

  def welcomed(self, welcome: Welcome, joins: bool, now: float) -> None:
    """A coordinator says how far the run is.

    Args:
      welcome: what it says.
      joins: whether this is a new member.
      now: the time.
    """
    self.epoch, self.beginnings = welcome.epoch, welcome.beginnings
    self.read, self.progress = welcome.step, welcome.progress
    self.lineage = welcome.origin.lineage
    self._tell_progress()
    if joins:
      ends_in = welcome.ends_in
      self._ends = None if ends_in is None else now + ends_in

  def ends_in(self, step: int, now: float) -> float | None:
    """Seconds until the step ends that it has joined amid, if that goes on."""
    if self._ends is None or step != self.read:
      return None
    return max(0.0, self._ends - now)

  def since(self, now: float) -> float:
    """Seconds since it knows of the last step; 0 for none."""
    return now - self._read_at if self._read_at else 0.0

  def committed(self, commit: Committed, applied: int, now: float) -> None:
    """A step is committed; the replica's state has so many."""
    self._read_at = now
    self.read += 1
    self._ends = None
    if self._has_data:
      self.progress = after(self.progress, commit)
      self._progress_at[self.read] = self.progress
      for step in [s for s in self._progress_at if s < applied]:
        del self._progress_at[step]
    self._tell_progress()

  def _tell_progress(self) -> None:
    if self._has_data:
      self._out.append(fx.Progressed(self.read, self.progress))
