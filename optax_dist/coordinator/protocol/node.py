"""One process: its follower, and the leader it may be, behind one `step`.

This is what a driver and the simulation run. What the two tell each other goes
the same way as any message, only without a connection.
"""

from __future__ import annotations

import collections

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.follower import Follower
from optax_dist.coordinator.protocol.inputs import Input
from optax_dist.coordinator.protocol.leader import Leader

_TO_LEADER = (
  msg.Hello,
  msg.Arrive,
  msg.Done,
  msg.Failed,
  msg.Applied,
  msg.NeedsSnapshot,
  msg.Leave,
  msg.Finish,
  msg.Save,
  msg.Fingerprint,
)


class Node:
  """A replica's process, as the core sees it.

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
    """Numbers a request to the store."""
    self._requests += 1
    return self._requests

  def step(self, input_: Input, now: float) -> list[Effect]:
    """Takes one input; returns what is to be done, in order."""
    out: list[Effect] = []
    todo: collections.deque[Input] = collections.deque([input_])
    while todo:
      next_ = todo.popleft()
      for effect in self._step(next_, now):
        if isinstance(effect, fx.Send) and effect.peer == self._config.process:
          todo.append(ins.Received(effect.peer, effect.message))
        else:
          out.append(effect)
    return out

  def deadline(self) -> float:
    """When `TimePassed` is to be the next input, at the latest."""
    time = self.follower.deadline()
    return time if self.leader is None else min(time, self.leader.deadline())

  def missing(self, now: float) -> str:
    """What the replica waits for, in words."""
    return self.follower.missing(now)

  def _step(self, input_: Input, now: float) -> list[Effect]:
    effects: list[Effect] = []
    leader = self.leader
    to_leader, to_follower = leader is not None, True
    if isinstance(input_, ins.Received) and to_leader:
      to_leader = isinstance(input_.message, _TO_LEADER)
      to_follower = not to_leader
    elif isinstance(input_, ins.Malformed):
      to_follower = not to_leader
    if leader is not None and to_leader:
      effects += leader.step(input_, now)
    if to_follower:
      effects += self.follower.step(input_, now)
    elected = self.follower.elected
    if leader is not None and (
      leader.over or self.follower.view.term > leader.term
    ):
      self.leader = None
      effects += leader.resign()
      effects.append(fx.LeadershipChanged(False, leader.term))
      effects.append(fx.CloseJournal())
      if self.follower.view.term == leader.term:
        lost = ins.PeerLost(self._config.process, "left", leader.over)
        effects += self.follower.step(lost, now)
    if elected is not None:
      self.follower.elected = None
      position, record = elected
      view = self.follower.view.copy()
      self.leader = Leader(
        self._config,
        view,
        position,
        record,
        self.follower.recent,
        self._count,
      )
      effects.append(fx.LeadershipChanged(True, view.term))
      effects += self.leader.begin(now)
    return effects
