"""One process: its follower, and the leader it may be, behind one `step`.

Drivers and the simulation run this. The messages between the two are delivered
like any others, only without a connection.
"""

from __future__ import annotations

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import Process, ReplicaId
from optax_dist.coordinator.protocol.follower.follower import Follower
from optax_dist.coordinator.protocol.inputs import Input
from optax_dist.coordinator.protocol.leader.leader import Leader


class Node:
  """The protocol core of a replica's process.

  Attributes:
    follower: its follower.
    leader: its leader, while it is one.
  """

  def __init__(self, config: Config):
    self._config = config
    self._requests = 0
    self.follower = Follower(config, self._count)
    self.leader: Leader | None = None

  def _count(self) -> int:
    """Numbers the requests to the store."""
    self._requests += 1
    return self._requests

  def step(self, input_: Input, now: float) -> list[Effect]:
    """Processes an input; returns the effects, in order."""
    me = self._config.process
    out: list[Effect] = []
    todo = [input_]
    for next_ in todo:  # It grows meanwhile.
      for effect in self._step(next_, now):
        if isinstance(effect, fx.Send) and effect.peer == me:
          todo.append(ins.Received(me, effect.message))
        elif isinstance(effect, fx.SendAll) and me in effect.peers:
          todo.append(ins.Received(me, effect.message))
          others = tuple([peer for peer in effect.peers if peer != me])
          if others:
            out.append(fx.SendAll(others, effect.message))
        else:
          out.append(effect)
    return out

  def deadline(self) -> float:
    """When `TimePassed` must be the next input, at the latest."""
    time = self.follower.deadline()
    return time if self.leader is None else min(time, self.leader.deadline())

  @property
  def stalled(self) -> bool:
    """Whether other replicas wait, as far as this one knows."""
    return self.follower.stalled

  def missing(self, now: float) -> str:
    """What the replica is waiting for, for an error message."""
    return self.follower.missing(now)

  def log_read(self) -> tuple[int, frozenset[Process], frozenset[ReplicaId]]:
    """Where the log ends, all members' processes, and lost replicas."""
    position, view = self.follower.read()
    processes = frozenset(m.process for m in view.members.values())
    lost = frozenset(r for r, left in view.departed.items() if not left)
    return position, processes, lost

  def _step(self, input_: Input, now: float) -> list[Effect]:
    leader, follower = self.leader, self.follower
    if leader is None:
      effects = follower.step(input_, now)
    elif isinstance(input_, ins.Received):
      to_leader = isinstance(input_.message, msg.ToLeader)
      effects = (leader if to_leader else follower).step(input_, now)
    else:
      effects = leader.step(input_, now)
      if not isinstance(input_, ins.Malformed):
        effects += follower.step(input_, now)
    elected = follower.elected
    if leader is not None and (leader.over or follower.view.term > leader.term):
      self.leader = None
      effects += leader.resign()
      effects.append(fx.LeadershipChanged(False))
      if follower.view.term == leader.term:
        lost = ins.PeerLost(self._config.process, "left", leader.over)
        effects += follower.step(lost, now)
    if elected is not None:
      follower.elected = None
      position, records = elected
      view = follower.view.copy()
      self.leader = Leader(self._config, view, position, records, self._count)
      effects += self.leader.begin(now)
    return effects
