"""Replicas outside the run: lost, expected back, or waiting to join."""

from __future__ import annotations

from collections.abc import Iterator

from optax_dist.coordinator.protocol.coordinator.members import (
  Members,
  MemberState,
)
from optax_dist.coordinator.protocol.entries import (
  Incarnation,
  Process,
  ReplicaId,
)
from optax_dist.coordinator.protocol.messages import Hello


class Absent:
  """What a coordinator knows of replicas that are no members."""

  def __init__(self) -> None:
    # Members that were allowed to leave, and have yet to know.
    self._left: set[Incarnation] = set()
    # Replicas from before the run began again, and until when they may rejoin.
    self._expected: dict[ReplicaId, float] = {}
    # Calls with the id of a live replica, and until when they wait.
    self._rivals: dict[Process, tuple[float, Hello]] = {}

  def deadlines(self) -> list[float]:
    """When `ready` or `overdue` may find something."""
    rivals = [until for until, _ in self._rivals.values()]
    return rivals + list(self._expected.values())

  def joined(self, replica: ReplicaId) -> None:
    """A replica is a member now."""
    self._expected.pop(replica, None)

  def let_go(self, state: MemberState) -> None:
    """A member was allowed to leave."""
    self._left.add(state.member.incarnation)

  def has_left(self, incarnation: Incarnation) -> bool:
    """Whether a member was allowed to leave, perhaps without knowing."""
    return incarnation in self._left

  def expect(self, replica: ReplicaId, until: float) -> None:
    """A replica from before the run began again may rejoin until then."""
    self._expected[replica] = until

  def overdue(self, now: float) -> list[ReplicaId]:
    """Replicas that have not rejoined in time; stops waiting for them."""
    late = [r for r, until in self._expected.items() if now >= until]
    for replica in late:
      del self._expected[replica]
    return late

  def wait(self, peer: Process, hello: Hello, until: float) -> None:
    """A call waits, since a live replica has its id."""
    self._rivals[peer] = until, hello

  def forget_process(self, peer: Process) -> None:
    """A process that may have called is gone."""
    self._rivals.pop(peer, None)

  def ready(
    self, members: Members, now: float
  ) -> Iterator[tuple[Process, Hello]]:
    """Calls that have waited long enough, one after the other."""
    for peer, (until, hello) in list(self._rivals.items()):
      rival = members.of_replica(hello.replica)
      if rival is None or rival.member.process == peer or now >= until:
        del self._rivals[peer]
        yield peer, hello
