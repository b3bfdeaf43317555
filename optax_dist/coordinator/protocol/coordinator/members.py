"""The members, and what a coordinator knows of their progress."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator

from optax_dist.coordinator.protocol.entries import (
  Incarnation,
  Member,
  Process,
  ReplicaId,
  Start,
)


@dataclasses.dataclass(slots=True)
class MemberState:
  """The state of a member.

  Attributes:
    member: the membership.
    until: when the member is removed, unless it has called this coordinator by then;
      infinity once it has.
    applied: the step that its state has at least; -1 if its state may not be the
      run's.
    needs: whether it needs a snapshot.
    server: the member that serves the snapshot.
    fetches: whether it has a request to fetch a snapshot, and has not reported the
      outcome yet: it may have the snapshot although the server is gone.
    tried: members that have failed to serve it a snapshot.
    sequence: sequence of its last submission.
    leaving: the step of the state with which it leaves, and the time since which it
      waits to leave, restarted when a replica joins; None if it stays.
    reported: the step of the last `Report` to it.
    start: the state that it had when it called.
    not_finite: how many of its gradients in a row were not finite.
    named_at: the value of `not_finite` at the last warning; 0 if there was none.
    rival: the last other process that has called with the same replica id.
  """

  member: Member
  until: float = math.inf
  applied: int = -1
  needs: bool = False
  server: Incarnation | None = None
  fetches: bool = False
  tried: set[Incarnation] = dataclasses.field(default_factory=set)
  sequence: int = -1
  leaving: tuple[int, float] | None = None
  reported: int = -1
  start: Start = dataclasses.field(default_factory=Start)
  not_finite: int = 0
  named_at: int = 0
  rival: Process = ""

  @property
  def is_connected(self) -> bool:
    """Whether it has called this coordinator."""
    return self.until == math.inf

  @property
  def waits(self) -> bool:
    """Whether it waits for anything other than the next step."""
    return self.until < math.inf or self.needs or self.leaving is not None

  def has(self, step: int) -> bool:
    """Whether it can reach the state of a step without a snapshot."""
    return self.applied >= step and not self.needs

  def reconnected(self, applied: int) -> None:
    """The member has called, with the state of a step."""
    self.until, self.applied, self.needs = math.inf, -1, False
    self.has_applied(applied)

  def has_applied(self, step: int) -> None:
    """The member has the state of a step, and needs no snapshot any more.

    The state may come from an earlier snapshot than the one that is being served; the
    member then ignores the later one.
    """
    self.applied = step if self.needs else max(self.applied, step)
    self.needs, self.server, self.fetches = False, None, False
    self.tried.clear()


class Members:
  """The members: by incarnation, by process and by replica."""

  def __init__(self) -> None:
    self._states: dict[Incarnation, MemberState] = {}
    self._by_process: dict[Process, MemberState] = {}
    # Cache of `waiting`; None if it has to be computed anew. There may be hundreds of
    # members, and most messages are gradients, which don't change it.
    self._waiting: list[MemberState] | None = None

  def __len__(self) -> int:
    return len(self._states)

  def __iter__(self) -> Iterator[MemberState]:
    return iter(self._states.values())

  def __contains__(self, incarnation: Incarnation) -> bool:
    return incarnation in self._states

  def __getitem__(self, incarnation: Incarnation) -> MemberState:
    return self._states[incarnation]

  def get(self, incarnation: Incarnation) -> MemberState | None:
    """The member with an incarnation, or None."""
    return self._states.get(incarnation)

  def of_process(self, process: Process) -> MemberState | None:
    """The member of a process, or None."""
    return self._by_process.get(process)

  def of_replica(self, replica: ReplicaId) -> MemberState | None:
    """The member with a replica's id, or None."""
    for state in self._states.values():
      if state.member.replica == replica:
        return state
    return None

  def add(self, state: MemberState) -> None:
    """Adds a member."""
    self._states[state.member.incarnation] = state
    self._by_process[state.member.process] = state
    self._waiting = None

  def remove(self, incarnation: Incarnation) -> bool:
    """Removes a member; returns whether it was one.

    Members to which it served a snapshot need another server.
    """
    state = self._states.pop(incarnation, None)
    if state is None:
      return False
    process = state.member.process
    if self._by_process.get(process) is state:
      del self._by_process[process]
    for other in self._states.values():
      if other.server == incarnation:
        other.server = None
    self._waiting = None
    return True

  def waiting(self) -> list[MemberState]:
    """The members that wait for anything other than the next step."""
    if self._waiting is None:
      self._waiting = [s for s in self._states.values() if s.waits]
    return self._waiting

  def changed(self) -> None:
    """The set of waiting members may have changed."""
    self._waiting = None

  def have(self, step: int) -> bool:
    """Whether a member can reach the state of a step without a snapshot."""
    return any(state.has(step) for state in self._states.values())

  def server_for(self, state: MemberState, step: int) -> MemberState | None:
    """The member best placed to serve a snapshot.

    A member with the latest state is preferred to one that has yet to get it.

    Args:
      state: the member that needs the snapshot.
      step: the latest step.
    """
    able = [
      s
      for s in self._states.values()
      if s is not state and s.is_connected and s.applied >= 0 and not s.needs
    ]
    fresh = [s for s in able if s.member.incarnation not in state.tried]
    if not fresh:
      state.tried.clear()
    return max(
      fresh or able,
      key=lambda s: (
        s.applied >= step,
        s.leaving is None,
        s.applied,
        s.member.incarnation,
      ),
      default=None,
    )
