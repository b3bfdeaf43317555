"""The rounds in which a replica takes part, and their means."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal, TypeAlias

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.codec import replace
from optax_dist.coordinator.protocol.effects import Effect
from optax_dist.coordinator.protocol.entries import Incarnation, RoundId
from optax_dist.coordinator.protocol.messages import (
  Done,
  Failed,
  Message,
  Round,
)

# Number of means kept for readers that are slightly behind.
RECENT_MEANS = 2

# Sends a message to the coordinator; returns whether it is connected.
SendMessage: TypeAlias = Callable[[Message], bool]
Status: TypeAlias = Literal["runs", "done", "failed"]


@dataclasses.dataclass(slots=True)
class _Work:
  """An aggregation in which this replica takes part."""

  answers: bool
  lag: int = 0
  status: Status = "runs"
  committed: bool = False


class Means:
  """Takes part in rounds, as a member or a reader.

  Attributes:
    ahead: the round whose mean is applied to a speculative state, or None.
  """

  def __init__(self, out: list[Effect], send: SendMessage):
    """Starts without rounds.

    Args:
      out: the list to which effects are appended.
      send: sends a message to the coordinator.
    """
    self._out, self._send = out, send
    self.ahead: RoundId | None = None
    self._work: dict[RoundId, _Work] = {}
    # An early round, until this replica has a gradient for it.
    self._early: Round | None = None
    # Rounds to read once the snapshot is here; None if rounds are read at once.
    self._later: list[fx.Aggregate] | None = None

  def status(self, round_: RoundId) -> Status | None:
    """Whether the mean of a round is here; None if the replica takes no part in it."""
    work = self._work.get(round_)
    return None if work is None else work.status

  def announced(self, message: Round, me: Incarnation) -> None:
    """Takes part in a round; in an early round only once there is a gradient."""
    if message.round.early:
      self._early = message
      return
    for other in list(self._work):
      if other.step == message.round.step and not self._work[other].committed:
        self._drop(other)
    self._early = None
    self._begin(message, me)

  def begin_early(
    self, me: Incarnation, sequence: int, step: int
  ) -> RoundId | None:
    """Begins the early round of a step with a gradient.

    Returns:
      The round's id; None if there is no early round. An early round is begun only
      once: a second gradient under the same id could be mistaken for the first.
    """
    message, self._early = self._early, None
    if message is None or message.round.step != step:
      return None
    parts = tuple(
      replace(part, sequence=sequence) if part.incarnation == me else part
      for part in message.parts
    )
    self._begin(replace(message, parts=parts), me)
    return message.round if message.round in self._work else None

  def forget_early(self) -> None:
    """Forgets the early round: its coordinator is lost, or the state is not current."""
    self._early = None

  def _begin(self, message: Round, me: Incarnation) -> None:
    round_ = message.round
    incarnations = [peer.incarnation for peer in message.peers]
    reads = me in [reader.incarnation for reader in message.readers]
    if me not in incarnations and not reads:
      return
    index = None if reads else incarnations.index(me)
    answers = index is not None or me == message.witness
    self._work[round_] = _Work(answers, message.lag)
    readers = () if reads else message.readers
    effect = fx.Aggregate(round_, message.parts, message.peers, readers, index)
    if reads and self._later is not None:
      self._later.append(effect)
    else:
      self._out.append(effect)

  def snapshot_first(self) -> None:
    """Delays rounds until the snapshot is here: without it their means are useless.

    Rounds that were announced before are read at once, since the snapshot may be of a
    later step, and so may wait for them.
    """
    self.go_on()
    self._later = []

  def go_on(self) -> None:
    """The snapshot is here, or won't come: reads delayed rounds that still matter."""
    later, self._later = self._later or (), None
    self._out += [effect for effect in later if effect.round in self._work]

  def cancelled(self, round_: RoundId) -> None:
    """A round won't be committed."""
    if self._early is not None and self._early.round == round_:
      self._early = None
    if round_ in self._work and not self._work[round_].committed:
      self._drop(round_)

  def aggregated(self, done: Done) -> bool:
    """A mean has arrived; returns whether it is still needed."""
    work = self._work.get(done.round)
    if work is None or work.status == "failed":
      # The round was released before its mean arrived.
      self._out.append(fx.Release(done.round))
      return False
    work.status = "done"
    if work.answers:
      self._send(done)
    return True

  def failed(self, failed: Failed) -> None:
    """An aggregation has failed, so its mean will not arrive."""
    work = self._work.get(failed.round)
    if work is not None:
      work.status = "failed"
      if work.answers and not work.committed:
        self._send(failed)

  def committed(self, round_: RoundId) -> None:
    """A round is in a commit."""
    work = self._work.get(round_)
    if work is not None:
      work.committed = True

  def arrived_at(self, step: int) -> None:
    """The state has reached a step; releases means that no replica needs any more."""
    for round_, work in list(self._work.items()):
      kept = (
        round_.step + RECENT_MEANS + work.lag if work.committed else round_.step
      )
      if kept < step:
        self._drop(round_)

  def end(self) -> None:
    """The membership has ended.

    Reported means are kept, since they may still be committed.
    """
    for round_, work in list(self._work.items()):
      if not work.committed and not (work.answers and work.status == "done"):
        self._drop(round_)

  def _drop(self, round_: RoundId) -> None:
    del self._work[round_]
    self._out.append(fx.Release(round_))
    if self.ahead == round_:
      self.ahead = None
