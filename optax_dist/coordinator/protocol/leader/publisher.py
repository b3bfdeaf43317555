"""Sends the records of the log to its followers."""

from __future__ import annotations

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Process,
  Record,
)
from optax_dist.coordinator.protocol.membership import View

# With more followers, sending a record twice takes longer than the put during
# which they would prepare for it.
_MAX_PROPOSED = 8


class Publisher:
  """Keeps recent records, and sends each one to all followers.

  Attributes:
    first: the position of the oldest record that is kept.
    followers: the processes that get the log, and their addresses.
  """

  def __init__(self, first: int, record: Record, block: int):
    """Starts with the record of the leader's `Term`, at `first`.

    Args:
      first: its position.
      record: the record.
      block: at most twice as many records are kept.
    """
    self.first = first
    self.followers: dict[Process, str] = {}
    self._records = [record]
    self._most = 2 * block
    # The processes that got the record being put.
    self._proposed_to: set[Process] = set()

  @property
  def oldest(self) -> msg.Recorded:
    """The oldest record that is kept: at first that of the leader's `Term`."""
    return msg.Recorded(self.first, self._records[0])

  def follow(
    self,
    peer: Process,
    hello: msg.Hello,
    incarnation: int,
    end: int,
    view: View,
  ) -> list[Effect]:
    """Starts to send the log to a process.

    Args:
      peer: the process.
      hello: its request, with the position that it has read.
      incarnation: its membership; -1 if it has none.
      end: the position of the next record.
      view: the decisions of the log up to there.
    """
    self._proposed_to.discard(peer)
    position, call = hello.position, hello.call
    messages: list[msg.Message]
    if self.first <= position <= end:
      messages = [msg.Welcome(call, position, None, incarnation)]
      for at in range(position, end):
        messages.append(msg.Recorded(at, self._records[at - self.first]))
    else:
      messages = [msg.Welcome(call, end, view.dump(), incarnation)]
    self.followers[peer] = hello.address
    return [fx.Send(peer, message) for message in messages]

  def drop(self, peer: Process) -> None:
    """Stops sending to a process."""
    self.followers.pop(peer, None)
    self._proposed_to.discard(peer)

  def propose(
    self, position: int, record: Record, leader: Process
  ) -> list[Effect]:
    """Sends a record being put to followers that can prepare for it."""
    if not any(isinstance(e, Committed) and e.inline for e in record.entries):
      return []
    # Only a record with a mean can be prepared for.
    few = len(self.followers) <= _MAX_PROPOSED
    to = [peer for peer in self.followers if few or peer == leader]
    self._proposed_to = set(to)
    return _to_all(to, msg.Proposed(position, record))

  def append(self, position: int, record: Record) -> list[Effect]:
    """Sends a record that is in the log to all followers."""
    self._records.append(record)
    if len(self._records) > self._most:
      del self._records[0]
      self.first += 1
    # One message object for all, so that it is encoded once.
    brief = msg.Recorded(position, None)
    whole = msg.Recorded(position, record)
    prepared, self._proposed_to = self._proposed_to, set()
    return [
      *_to_all([p for p in self.followers if p in prepared], brief),
      *_to_all([p for p in self.followers if p not in prepared], whole),
    ]

  def to_all(self, message: msg.Message) -> list[Effect]:
    """Sends a message to all followers."""
    return _to_all(list(self.followers), message)


def _to_all(peers: list[Process], message: msg.Message) -> list[Effect]:
  return [fx.SendAll(tuple(peers), message)] if peers else []
