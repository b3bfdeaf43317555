"""The entries and effects that one input of a coordinator leads to."""

from __future__ import annotations

from collections.abc import Iterable

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol.coordinator.members import MemberState
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import (
  Entry,
  Process,
  Record,
)
from optax_dist.coordinator.protocol.history import History
from optax_dist.coordinator.protocol.messages import Message


class Outbox:
  """The entries and effects of one input, in order."""

  def __init__(self, history: History) -> None:
    self._history = history
    self._entries: list[Entry] = []
    self._effects: list[Effect] = []

  def append(self, entry: Entry) -> None:
    """Adds a decision, which is in the log before any effect happens."""
    self._entries.append(entry)
    self._history.add(entry)

  def add(self, *effects: Effect) -> None:
    """Adds effects."""
    self._effects += effects

  def send(self, peer: Process, message: Message) -> None:
    """Sends to a process."""
    self._effects.append(fx.Send((peer,), message))

  def notify(self, state: MemberState, message: Message) -> None:
    """Sends to a member, if it is connected."""
    if state.is_connected:
      self.send(state.member.process, message)

  def notify_all(self, states: Iterable[MemberState], message: Message) -> None:
    """Sends to all connected members among `states`; the message is encoded once."""
    peers = tuple([s.member.process for s in states if s.is_connected])
    if peers:
      self._effects.append(fx.Send(peers, message))

  def note(self, note: journal_events.Record) -> None:
    """Writes into the journal."""
    self._effects.append(fx.WriteJournal(note))

  def take(self) -> list[Effect]:
    """Returns all effects, and starts anew."""
    entries, effects = tuple(self._entries), self._effects
    self._entries, self._effects = [], []
    if entries:
      # First, so that each decision is in the log before any other process knows it.
      effects.insert(0, fx.Append(Record(entries)))
    return effects
