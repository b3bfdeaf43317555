"""Sends the records of the log to its followers."""

from __future__ import annotations

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import (
  Process,
  Record,
)
from optax_dist.coordinator.protocol.membership import View


class Publisher:
  """Keeps recent records, and sends each one to all followers.

  Attributes:
    followers: the processes that get the log, and their addresses.
  """

  def __init__(self, first: int, record: Record, block: int):
    """Starts with the record of the leader's `Term`, at `first`.

    Args:
      first: its position.
      record: the record.
      block: at most twice as many records are kept.
    """
    self.followers: dict[Process, str] = {}
    self._records = [msg.Recorded(first, record)]
    self._most = 2 * block

  @property
  def oldest(self) -> msg.Recorded:
    """The oldest record that is kept: at first that of the leader's `Term`."""
    return self._records[0]

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
    position, call = hello.position, hello.call
    messages: list[msg.Message]
    if self.oldest.position <= position <= end:
      messages = [msg.Welcome(call, position, None, incarnation)]
      messages += [one for one in self._records if one.position >= position]
    else:
      messages = [msg.Welcome(call, end, view.copy(), incarnation)]
    self.followers[peer] = hello.address
    return [fx.Send(peer, message) for message in messages]

  def drop(self, peer: Process) -> None:
    """Stops sending to a process."""
    self.followers.pop(peer, None)

  def append(self, position: int, record: Record) -> list[Effect]:
    """Sends a record that is in the log to all followers."""
    recorded = msg.Recorded(position, record)
    self._records.append(recorded)
    if len(self._records) > self._most:
      del self._records[0]
    return self.to_all(recorded)

  def to_all(self, message: msg.Message) -> list[Effect]:
    """Sends a message to all followers."""
    # One message object for all, so that it is encoded once.
    peers = tuple(self.followers)
    return [fx.SendAll(peers, message)] if peers else []
