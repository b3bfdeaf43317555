"""How a run ends: once all members have its last state, or at once with an error."""

from __future__ import annotations

import math
from typing import Literal

from optax_dist import quorum
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.coordinator.hosts import Hosts
from optax_dist.coordinator.protocol.coordinator.members import Members
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.coordinator.snapshots import Snapshots
from optax_dist.coordinator.protocol.coordinator.steps.steps import Steps
from optax_dist.coordinator.protocol.entries import Ended, Process
from optax_dist.coordinator.protocol.history import History


class Ending:
  """The end of a run.

  Attributes:
    since: since when the end waits for members that lack the final state; None as long
      as steps are taken.
    addresses: the address of each process that has called; all of them are notified of
      the end.
  """

  def __init__(
    self,
    config: Config,
    history: History,
    hosts: Hosts,
    members: Members,
    steps: Steps,
    snapshots: Snapshots,
    out: Outbox,
    until: float,
  ):
    """Starts without a reason to end.

    Args:
      config: the run's.
      history: all decisions in the log.
      hosts: the launchers, which know which replicas may come.
      members: the members.
      steps: the steps of the run.
      snapshots: asks members for their steps.
      out: collects what is written and sent.
      until: until when launchers may call, if the coordinator has started again.
    """
    self.since: float | None = None
    self.addresses: dict[Process, str] = {}
    self._reason = "all replicas have left"
    self._limits = config.deadlines
    # Since when the run has no members.
    self._empty_since = math.inf
    # A coordinator that has started again waits for the launchers' calls: only they
    # know replicas that are about to join, which the log does not.
    goes_on = bool(history.members or history.departed)
    self._calls_until = until if goes_on else -math.inf
    self._history, self._hosts = history, hosts
    self._members, self._out = members, out
    self._steps, self._snapshots = steps, snapshots

  @property
  def is_over(self) -> bool:
    """Whether the end is in the log, so that nothing else is decided."""
    return self._history.ended is not None

  def deadlines(self, now: float) -> list[float]:
    """When `check` and `check_empty` may find something."""
    times = [self._empty_since + self._limits.timeout]
    if now < self._calls_until:
      times.append(self._calls_until)
    if self.since is not None:
      times.append(self.since + self._limits.transfer)
    return times

  def finish(self, reason: str) -> None:
    """Takes no more steps; the run ends once all members have the final state."""
    if self.since is None and not self.is_over:
      self._reason = reason
      self._steps.ruling.apply(quorum.Finish())
      self._steps.end()

  def some_may_come(self, now: float) -> bool:
    """Whether replicas may still join that are no members: lost ones or new ones."""
    history = self._history
    unknown = now < self._calls_until
    return bool(unknown or history.lost() or self._hosts.coming(history))

  def check_empty(self, now: float) -> None:
    """Ends a run that all replicas have left, since none has its state any more.

    The run goes on while a lost replica may come back, or a launcher has started
    replicas that have not joined yet; these have to join in time.
    """
    if self._members or not self._history.departed or self._history.lost():
      self._empty_since = math.inf
      return
    self._empty_since = min(self._empty_since, now)
    reason = "all replicas have left"
    if not self.some_may_come(now):
      self.record(reason)
    elif now >= self._empty_since + self._limits.timeout:
      names = ", ".join(sorted(map(str, self._hosts.coming(self._history))))
      self.record(f"{reason}, and replica {names} has not joined in time")

  def check(self, now: float) -> None:
    """Ends the run once all members have the final state, or after a while."""
    if not self._steps.ruling.state.finished or self.is_over:
      return
    if self.since is None:
      # From now on the end waits for members that are behind.
      self.since = now
      self._steps.end()
    step = self._steps.step
    late = [s for s in self._members if not s.has(step)]
    for state in late:
      self._snapshots.request_report(state, step)
    if not late or now >= self.since + self._limits.transfer:
      self.record(self._reason)

  def record(
    self, reason: str, error: Literal["", "CoordinatorError", "Diverged"] = ""
  ) -> None:
    """Ends the run now, unless it has ended.

    Args:
      reason: why.
      error: see `Ended`.
    """
    if self.is_over:
      return
    self._steps.end()
    dropped = tuple(sorted(self._steps.gradients.dropped.items()))
    ended = Ended(self._steps.step, reason, error, dropped)
    self._out.append(ended)
    peers = (*self.addresses, *sorted(self._hosts.launchers))
    if peers:
      self._out.add(fx.Send(peers, ended))
    self._out.note(journal_events.finished(ended, self._history.applied))
