"""A replica's knowledge of its run, as coordinators have sent it."""

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
  """How far the run is, what it began from, and what the replica computes next.

  Attributes:
    epoch: epoch of the last coordinator that welcomed the replica; -1 for none.
    beginnings: how often the run had begun by then.
    nonce: nonce of that run; "" before.
    read: how many committed steps the replica knows of.
    progress: the samples in these steps, if samples are leased.
    lineage: the runs that this run continues.
    compute: seconds that the replica's last gradient took; 0 if unknown.
    requested: how many gradients the replica computes next.
    lease: the samples that the replica computes on.
  """

  def __init__(
    self, process: Process, start: Start, has_data: bool, out: list[Effect]
  ):
    """Starts before any coordinator has said anything.

    Args:
      process: the replica's.
      start: the state that the replica starts with.
      has_data: whether samples are leased.
      out: the list to which effects are appended.
    """
    self._process, self._has_data, self._out = process, has_data, out
    self.epoch, self.beginnings, self.nonce = -1, 0, ""
    self.read, self.progress = start.step, start.progress
    self.lineage = start.lineage
    # The progress at each step from that of the replica's state on.
    self._progress_at = {start.step: start.progress}
    # When the replica learned of the last commit.
    self._read_at, self.compute = 0.0, 0.0
    # If the replica has joined during a step that does not wait for it: when this step
    # is expected to end; otherwise None.
    self._ends: float | None = None
    self.requested = 1
    self.lease: Spans = ()

  @property
  def run_id(self) -> str:
    """Identifies the run, from its last beginning on."""
    return run_id(self.nonce, self.beginnings)

  def offer(self, step: int) -> Start:
    """The replica's state as a start state, from which the run may begin again.

    Args:
      step: the step of that state.
    """
    progress = self._progress_at.get(step, self.progress)
    digest = f"{self._process} at step {step}"
    lineage = (*self.lineage, (self.run_id, step))
    return Start(step, digest, progress, lineage)

  def welcomed(self, welcome: Welcome, joins: bool, now: float) -> None:
    """A coordinator has welcomed the replica, and says how far the run is.

    Args:
      welcome: its message.
      joins: whether the replica has become a new member.
      now: the time.
    """
    self.epoch, self.beginnings = welcome.epoch, welcome.beginnings
    self.nonce = welcome.nonce
    self.read, self.progress = welcome.step, welcome.progress
    if welcome.anew:
      self._progress_at.clear()  # These were other steps with the same numbers.
    self._progress_at[self.read] = self.progress
    self.lineage = welcome.origin.lineage
    self._out.append(fx.UseRun(self.nonce, self.run_id, self.lineage))
    if self._has_data:
      self._out.append(fx.Progressed(self.read, self.progress))
    if joins:
      ends_in = welcome.ends_in
      self._ends = None if ends_in is None else now + ends_in

  def ends_in(self, step: int, now: float) -> float | None:
    """Seconds until the step ends during which the replica has joined, if known."""
    if self._ends is None or step != self.read:
      return None
    return max(0.0, self._ends - now)

  def since(self, now: float) -> float:
    """Seconds since the replica learned of the last commit; 0 before any."""
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
    """A step is committed, and the commit may contain a lease.

    Args:
      commit: the commit.
      incarnation: the replica's membership.
      applied: the step of the replica's state.
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
