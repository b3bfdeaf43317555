"""What a leader sends.

What follows from its decisions is held back until they are in the log
(`LogWriter.say`), so no replica acts on a decision that may be lost.
"""

from __future__ import annotations

from collections.abc import Iterable

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import notes
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import Process
from optax_dist.coordinator.protocol.leader.roster import MemberState
from optax_dist.coordinator.protocol.log import LogWriter
from optax_dist.coordinator.protocol.messages import Message


class Outbox:
  """The effects of one step of a leader, in order."""

  def __init__(self, log: LogWriter):
    self._log = log
    self._effects: list[Effect] = []

  def add(self, *effects: Effect) -> None:
    """Adds effects that wait for nothing."""
    self._effects += effects

  def send(self, peer: Process, message: Message) -> None:
    """Sends a message at once."""
    self._effects.append(fx.Send(peer, message))

  def hold(self, effect: Effect) -> None:
    """Adds an effect once earlier decisions are in the log."""
    self._log.say(self._effects, effect)

  def say(self, state: MemberState, message: Message) -> None:
    """Sends to a member, once earlier decisions are in the log."""
    self.hold(fx.Send(state.member.process, message))

  def say_to(self, states: Iterable[MemberState], message: Message) -> None:
    """Sends to several members, as `say` does; it is encoded once."""
    peers = tuple([state.member.process for state in states])
    if peers:
      self.hold(fx.SendAll(peers, message))

  def note(self, note: notes.Record) -> None:
    """Writes into the journal, once earlier decisions are in the log."""
    self.hold(fx.WriteJournal(note))

  def take(self) -> list[Effect]:
    """Returns the effects so far, and starts anew."""
    effects, self._effects = self._effects, []
    return effects
