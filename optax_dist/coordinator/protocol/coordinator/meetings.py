"""Where the processes of a replica find each other, before they join a run.

    process r   Meet     ->   until all processes of the replica have called
                         <-   Awaited (which are missing), then Met (where process 0 is)
                         <-   Parted: a process is lost, and its replica with it

A process stays connected until it joins; from then on the replica's own processes
notice a loss. Meetings are not in the log: if the coordinator dies, processes that
still wait call the next one.
"""

from __future__ import annotations

import dataclasses

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import Process, ReplicaId


@dataclasses.dataclass
class _Meeting:
  """The processes of a replica that have called.

  Attributes:
    count: how many processes the replica has.
    here: the calls so far, by the process's index.
    peers: the names of these processes, by index.
    generation: which start of the replica this is; "" until all have called.
  """

  count: int
  here: dict[int, msg.Meet] = dataclasses.field(default_factory=dict)
  peers: dict[int, Process] = dataclasses.field(default_factory=dict)
  generation: str = ""

  @property
  def missing(self) -> tuple[int, ...]:
    return tuple(i for i in range(self.count) if i not in self.here)


class Meetings:
  """The multi-process replicas that have not joined yet.

  Example:
    >>> meetings = Meetings()
    >>> meetings.called("b", msg.Meet("", 0, 1, 2, ""))
    [Send(peers=('b',), message=Awaited(missing=(0,)))]
    >>> (sent,) = meetings.called("a", msg.Meet("", 0, 0, 2, "10.0.0.1:29500"))
    >>> sent
    Send(peers=('b', 'a'), message=Met(generation='a', address='10.0.0.1:29500'))
  """

  def __init__(self) -> None:
    """Starts before any process has called."""
    self._meetings: dict[ReplicaId, _Meeting] = {}
    self._where: dict[Process, tuple[ReplicaId, int]] = {}

  def called(self, peer: Process, meet: msg.Meet) -> list[fx.Send]:
    """A process looks for the others of its replica, or says that it will not join."""
    if meet.ended:
      return self.lost(peer, "ended", meet.ended)
    self.lost(peer, "left", "it calls again")
    out: list[fx.Send] = []
    meeting = self._meetings.get(meet.replica)
    if meet.index >= meet.count or (meeting and meeting.count != meet.count):
      others = "" if meeting is None else f", others of {meeting.count}"
      text = f"it is process {meet.index} of {meet.count}{others}"
      return [fx.Send((peer,), msg.Parted(text))]
    if meeting is not None and meeting.generation != meet.generation:
      if meet.generation:
        # The replica has started again while this process was away.
        text = "other processes of its replica have started again"
        return [fx.Send((peer,), msg.Parted(text))]
      why = f"its process {meet.index} has started again"
      out += self._part(meet.replica, why)
      meeting = None
    if meeting is None:
      meeting = _Meeting(meet.count, generation=meet.generation)
      self._meetings[meet.replica] = meeting
    elif meet.index in meeting.peers:
      before = meeting.peers[meet.index]
      del self._where[before]
      text = f"another process {meet.index} of its replica has called"
      out.append(fx.Send((before,), msg.Parted(text)))
    meeting.here[meet.index], meeting.peers[meet.index] = meet, peer
    self._where[peer] = meet.replica, meet.index
    return out + self._notify(meeting)

  def lost(self, peer: Process, how: str, reason: str) -> list[fx.Send]:
    """A process is not connected any more; if it has joined, `how` is "left"."""
    if peer not in self._where:
      return []
    replica, index = self._where.pop(peer)
    meeting = self._meetings[replica]
    del meeting.here[index], meeting.peers[index]
    if not meeting.here:
      del self._meetings[replica]
    elif meeting.generation and how != "left":
      why = f"its process {index} is lost ({how}: {reason})"
      return self._part(replica, why)
    return self._notify(meeting)

  def _notify(self, meeting: _Meeting) -> list[fx.Send]:
    """Tells waiting processes which ones are missing, or where to meet."""
    if meeting.generation:
      return []
    message: msg.Message = msg.Awaited(meeting.missing)
    if not meeting.missing:
      meeting.generation = meeting.peers[0]
      message = msg.Met(meeting.generation, meeting.here[0].address)
    return [fx.Send(tuple(meeting.peers.values()), message)]

  def _part(self, replica: ReplicaId, why: str) -> list[fx.Send]:
    """The replica ends, with all of its processes."""
    meeting = self._meetings.pop(replica)
    for peer in meeting.peers.values():
      del self._where[peer]
    return [fx.Send(tuple(meeting.peers.values()), msg.Parted(why))]
