"""Replicas that are no members: who may come back, and who has to wait."""

from __future__ import annotations

from collections.abc import Iterator

from optax_dist.coordinator.protocol.entries import (
  Incarnation,
  Process,
  ReplicaId,
)
from optax_dist.coordinator.protocol.leader.roster import MemberState, Roster
from optax_dist.coordinator.protocol.messages import Hello


class Candidates:
  """What a leader knows of replicas that have left, are lost, or want to join.

  Attributes:
    lost: replicas that were removed, and may come back.
  """

  def __init__(self, lost: set[ReplicaId]):
    """Starts with those that the log says are lost."""
    self.lost = lost
    # Members that this leader has allowed to leave.
    self._left: set[Incarnation] = set()
    # Replicas from before a fresh start, and until when they may rejoin.
    self._expected: dict[ReplicaId, float] = {}
    # Join requests with the id of a live replica, and until when they wait.
    self._rivals: dict[Process, tuple[float, Hello]] = {}

  def deadlines(self) -> list[float]:
    """When `ready` or `overdue` may find something."""
    rivals = [until for until, _ in self._rivals.values()]
    return rivals + list(self._expected.values())

  def joined(self, replica: ReplicaId) -> None:
    """A replica is a member now."""
    self._expected.pop(replica, None)
    self.lost.discard(replica)

  def removed(self, state: MemberState, left: bool) -> None:
    """A member was removed: it was allowed to leave, or is lost."""
    if left:
      self._left.add(state.member.incarnation)
    else:
      self.lost.add(state.member.replica)

  def has_left(self, hello: Hello, oldest: int) -> bool:
    """Whether a process was allowed to leave, and has yet to read of it.

    Args:
      hello: its call.
      oldest: the position of the oldest record that it can be sent.
    """
    return hello.incarnation in self._left and hello.position >= oldest

  def expect(self, replica: ReplicaId, until: float) -> None:
    """A replica from before a fresh start may rejoin until then."""
    self._expected[replica] = until

  def overdue(self, now: float) -> list[ReplicaId]:
    """Replicas that have not rejoined in time; they are expected no more."""
    late = [r for r, until in self._expected.items() if now >= until]
    for replica in late:
      del self._expected[replica]
    return late

  def wait(self, peer: Process, hello: Hello, until: float) -> None:
    """A join request waits, since a live replica has its id."""
    self._rivals[peer] = until, hello

  def gone(self, peer: Process) -> None:
    """A process that may have asked to join is gone."""
    self._rivals.pop(peer, None)

  def ready(
    self, roster: Roster, now: float
  ) -> Iterator[tuple[Process, Hello]]:
    """Join requests that have waited long enough, one after the other."""
    for peer, (until, hello) in list(self._rivals.items()):
      rival = roster.of_replica(hello.replica)
      if rival is None or rival.member.process == peer or now >= until:
        del self._rivals[peer]
        yield peer, hello


def difference(ours: tuple[tuple[str, str], ...], hello: Hello) -> str:
  """Names the difference between two agreements; "" if there is none."""
  theirs = dict(hello.agreement)
  for name, text in ours:
    other = theirs.get(name, "")
    if name not in theirs or _compared(other) != _compared(text):
      return (
        f"it differs in its {name}: it has {_shown(other)}, the job"
        f" {_shown(text)}"
      )
  return ""


def _compared(text: str) -> str:
  """The first line of a text that replicas must agree on."""
  return text.partition("\n")[0]


def _shown(text: str) -> str:
  """All lines of it, for people."""
  first, _, about = text.partition("\n")
  return f"{first!r:.300}" + (f" ({about:.300})" if about else "")
