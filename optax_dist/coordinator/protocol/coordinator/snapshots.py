"""Copies of the run's state: which member has it, and which serves it to which."""

from __future__ import annotations

from optax_dist.coordinator.protocol.coordinator.members import (
  Members,
  MemberState,
)
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.entries import Process
from optax_dist.coordinator.protocol.messages import Fetch, Report, Serve

# Members that are this many steps behind are asked for their step.
_ASK_LAG = 4


class Snapshots:
  """The snapshots that a coordinator has members serve each other.

  Attributes:
    lacking_since: since when no member has the run's state; None if one has.
  """

  def __init__(self, epoch: int, step: int, members: Members, out: Outbox):
    """Starts with no transfers.

    Args:
      epoch: the coordinator's.
      step: the latest step.
      members: the members.
      out: where messages go.
    """
    self.lacking_since: float | None = None
    self._epoch = epoch
    self._members, self._out = members, out
    self._transfers = 0
    # The step at which members that are behind were last asked for their step.
    self._requested_at = step

  def serve(self, step: int, at_least: int, now: float) -> None:
    """Serves members that need a snapshot.

    Args:
      step: the latest step.
      at_least: the step that a snapshot must have.
      now: the time.
    """
    waiting = self._members.waiting()
    unserved = [
      s for s in waiting if s.needs and s.server is None and s.is_connected
    ]
    for state in unserved:
      server = self._members.server_for(state, step)
      if server is not None:
        self._serve(server, state, at_least)
      elif all(s.needs or not s.is_connected for s in self._members):
        if self.lacking_since is None:
          self.lacking_since = now
        return
    self.lacking_since = None

  def _serve(
    self, server: MemberState, state: MemberState, at_least: int
  ) -> None:
    transfer = self._next_transfer()
    state.server, state.fetches = server.member.incarnation, True
    # From this step on the member is a reader of every round.
    state.applied = at_least
    to, source = state.member, server.member
    self._out.notify(server, Serve(transfer, to.process, to.address, at_least))
    self._out.notify(state, Fetch(transfer, source.process, source.address))

  def serve_final(self, peer: Process, address: str, step: int) -> None:
    """Serves the final state to a replica that fell behind at the end."""
    able = [s.member for s in self._members if s.is_connected and s.has(step)]
    if able:
      server, transfer = able[0], self._next_transfer()
      self._out.send(peer, Fetch(transfer, server.process, server.address))
      self._out.send(server.process, Serve(transfer, peer, address, step))

  def request_report(self, state: MemberState, step: int) -> None:
    """Asks a member to report when it has the state of a step."""
    if state.reported < step and state.is_connected:
      state.reported = step
      self._out.notify(state, Report(step))

  def request_reports(self, step: int, nobody: bool) -> None:
    """Asks members for their steps, if they may be far behind.

    Args:
      step: the latest step.
      nobody: whether gradients wait because no member is known to have this state.
    """
    if nobody:
      for state in self._members:
        self.request_report(state, step)
    if step != self._requested_at:
      self._requested_at = step
      for state in self._members:
        if step - state.applied >= _ASK_LAG and not state.needs:
          self.request_report(state, step)

  def _next_transfer(self) -> int:
    self._transfers += 1
    return (self._epoch << 32) + self._transfers
