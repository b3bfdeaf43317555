"""What a replica knows of its run, and computes next: all that coordinators said."""

from __future__ import annotations

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Incarnation,
  Process,
  Start,
  run_id,
)
from optax_dist.coordinator.protocol.history import after
from optax_dist.coordinator.protocol.messages import Welcome
from optax_dist.ledger import Spans


class Known:
  """How far the run is, what it has begun from, and what is asked of the replica.

  Attributes:
    epoch: of the last coordinator that has welcomed it; -1 for none.
    beginnings: how often the run had begun by then.
    nonce: of that run; "" before.
    read: how many steps there are.
    progress: the samples in these, if samples are leased.
    lineage: the runs that it continues.
    compute: the seconds that its last gradient took; 0 if unknown.
    requested: how many gradients it computes next.
    lease: the samples that it computes on.
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
    self.epoch, self.beginnings, self.nonce = -1, 0, ""
    self.read, self.progress = start.step, start.progress
    self.lineage = start.lineage
    # The samples in the steps since its state.
    self._progress_at = {start.step: start.progress}
    # When it got to know of the last step.
    self._read_at, self.compute = 0.0, 0.0
    # When the step is expected to end that it has joined amid; None if that step
    # waits for this replica.
    self._ends: float | None = None
    self.requested = 1
    self.lease: Spans = ()

  def offer(self, step: int) -> Start:
    """A state from which the run may begin that has lost all others.

    Args:
      step: its step, after the replica's first one.
    """
    progress = self._progress_at.get(step, self.progress)
    digest = f"{self._process} at step {step}"
    lineage = (*self.lineage, (self._name, step))
    return Start(step, digest, progress, lineage)

  @property
  def _name(self) -> str:
    """Another one whenever the run begins, and other steps may have their numbers."""
    return f"{run_id(self.nonce)}-{self.beginnings}"

  def welcomed(self, welcome: Welcome, joins: bool, now: float) -> None:
    """A coordinator says how far the run is.

    Args:
      welcome: what it says.
      joins: whether this is a new member.
      now: the time.
    """
    self.epoch, self.beginnings = welcome.epoch, welcome.beginnings
    self.nonce = welcome.nonce
    self.read, self.progress = welcome.step, welcome.progress
    if welcome.anew:
      self._progress_at.clear()  # Of other steps with these numbers.
    self._progress_at[self.read] = self.progress
    self.lineage = welcome.origin.lineage
    self._out.append(fx.UseRun(self.nonce, self._name, self.lineage))
    if self._has_data:
      self._out.append(fx.Progressed(self.read, self.progress))
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

  def request(self, count: int) -> None:
    """The replica should compute so many gradients."""
    if count != self.requested:
      self.requested = count
      self._out.append(fx.SetRequested(count))

  def lease_to(self, incarnation: Incarnation, spans: Spans) -> None:
    """Sets the samples of a membership."""
    if self._has_data and incarnation >= 0:
      self.lease = spans
      self._out.append(fx.Leased(incarnation, spans))

  def committed(
    self, commit: Committed, incarnation: Incarnation, applied: int, now: float
  ) -> None:
    """A step is committed, with a lease perhaps.

    Args:
      commit: the step.
      incarnation: the replica's membership.
      applied: the steps of its state.
      now: the time.
    """
    self._read_at = now
    self.read += 1
    self._ends = None
    if self._has_data:
      self.progress = after(self.progress, commit)
      self._progress_at[self.read] = self.progress
      for step in [s for s in self._progress_at if s < applied]:
        del self._progress_at[step]
      self._out.append(fx.Progressed(self.read, self.progress))
    for lease in commit.leases:
      if lease.incarnation == incarnation:
        self.lease_to(incarnation, lease.spans)
