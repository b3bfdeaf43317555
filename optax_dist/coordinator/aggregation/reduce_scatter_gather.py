"""Members average their gradients: reduce-scatter, then gather.

Of k members each is pushed one slice of every gradient, averages it in the
order of the round, and pushes the mean to all members and readers. A member
moves 2P(k-1)/k bytes in each direction, plus a slice for each reader; a reader
takes P in. Everything is pushed as soon as it is there, so a mean is two one-way
trips away from the gradients.

A failed round is kept until it is cancelled: if its transfers ended at once,
peers that wait for the same bytes would consider this replica failed.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from optax_dist.coordinator.aggregation.gradient import Gradient
from optax_dist.coordinator.aggregation.reducer import Reducer, Sum
from optax_dist.coordinator.protocol import (
  deadlines,
  effects,
  entries,
  inputs,
  messages,
)
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport import sockets

# Slices up to this many bytes together are averaged at once, in about a
# millisecond; larger ones in the background, so that messages go on meanwhile.
_AT_ONCE = 4 << 20


class Background(Protocol):
  """Runs work in another thread, and reports its end in this one."""

  def __call__(
    self, work: Callable[[], None], done: Callable[[], None] | None = None
  ) -> None:
    """Runs `work`, and then `done`, or what raises its error, in this thread."""
    ...


def transfer_id(kind: str, *names: object) -> int:
  """The id of a transfer, equal on both sides.

  Example:
    >>> transfer_id("mean", 3) == transfer_id("mean", 3)
    True
    >>> 0 <= transfer_id("part", 3) < 2**63
    True
  """
  text = repr((kind, *names)).encode()
  digest = hashlib.blake2b(text, digest_size=8).digest()
  return int.from_bytes(digest, "little") >> 1


@dataclasses.dataclass
class _Row:
  """One encoded array of a member: its gradient, or a node of a tree.

  Attributes:
    id: of the transfers of its slices.
    data: its bytes of this replica's slice, once they are here, perhaps in the
      memory of that process; not used for this replica itself.
  """

  id: int
  data: memoryview | None = None


@dataclasses.dataclass
class _Part:
  """One member of a round, as seen by another.

  Attributes:
    incarnation: its membership.
    process: its process.
    rows: what it adds to the sum: one array, or one for each of its nodes.
    mean: the id of the transfers of its slice of the mean.
    has_mean: whether its slice of the mean is here.
  """

  incarnation: int
  process: str
  rows: list[_Row]
  mean: int
  has_mean: bool = False


@dataclasses.dataclass
class _Round:
  """An aggregation.

  Attributes:
    id: its id.
    total: how the gradients are added up.
    parts: their members, in order.
    cuts: where slices begin and end, in elements.
    me: which slice this replica averages; None for a reader.
    mean: memory for the whole mean.
    readers: processes that fetch the mean besides.
    gradient: this replica's own, until its slice is averaged.
    averaging: whether another thread reads the gradients now.
    timed: since when it fails if nothing moves; None: it may wait for gradients
      that are still computed.
    answered: whether the core has its answer, or wants none any more.
  """

  id: entries.RoundId
  total: Sum
  parts: list[_Part]
  cuts: tuple[int, ...]
  me: int | None
  mean: memoryview
  readers: list[str]
  gradient: Gradient | None = None
  averaging: bool = False
  timed: float | None = None
  answered: bool = False


class _Transfer(NamedTuple):
  """A transfer under way.

  Attributes:
    round: of which it is part.
    at: of the other side in `parts`; of this replica for a slice of a mean
      that is sent.
    is_part: whether it is a slice of a gradient; otherwise of the mean.
    row: which of the rows of the member, for what comes of a gradient.
  """

  round: _Round
  at: int
  is_part: bool
  row: int = 0


class Aggregations:
  """One replica's side of all aggregations, over a `Transport`.

  The thread that owns the transport calls everything.
  """

  def __init__(
    self,
    transport: sockets.Transport,
    reducer: Reducer,
    background: Background,
    limits: deadlines.Deadlines,
    answer: Callable[[inputs.Input], None],
    reach: Callable[[str], None] = lambda phase: None,
  ):
    """Makes one without rounds.

    Args:
      transport: connections to the others.
      reducer: averages the slices of this replica.
      background: does what takes long.
      limits: how long a round may go on without a byte.
      answer: takes inputs for the protocol core.
      reach: called at each phase, "reduce_scatter" and "gather".
    """
    self._transport = transport
    self._reducer, self._place = reducer, reducer.place
    self._background = background
    self._limits = limits
    self._answer = answer
    self._reach = reach
    self._rounds: dict[entries.RoundId, _Round] = {}
    # By peer, transfer id, and whether it is sent.
    self._transfers: dict[tuple[str, int, bool], _Transfer] = {}

  def begin(
    self, effect: effects.Aggregate, gradient: Gradient | None = None
  ) -> None:
    """Takes part in an aggregation: with a gradient, or as a reader."""
    round_ = self._made(effect)
    if gradient is None or effect.me is None:
      self._reach("gather")
      for index in range(len(round_.parts)):
        self._expect_mean(round_, index)
      self._finish(round_)
      return
    round_.gradient = gradient
    self._reach("reduce_scatter")
    mine = round_.parts[effect.me]
    first, last = self._slice(round_, effect.me)
    for index, part in enumerate(round_.parts):
      if part is mine:
        continue
      self._expect_mean(round_, index)
      low, high = self._slice(round_, index)
      for i, row in enumerate(mine.rows if low < high else ()):
        data = gradient.parts(*self._within(i, low, high))
        transfer = _Transfer(round_, index, True)
        self._send(part.process, row.id, data, transfer)
      for i, row in enumerate(part.rows):
        if first < last:
          transfer = _Transfer(round_, index, True, i)
          self._expect(row.id, last - first, None, transfer)
        else:
          row.data = memoryview(b"")
    self._average(round_)

  def mean(self, round_: entries.RoundId) -> np.ndarray:
    """The bytes of a received mean."""
    return np.frombuffer(self._rounds[round_].mean, np.uint8)

  def drop(self, round_: entries.RoundId) -> None:
    """Executes `Release`: ends a round, whose mean may still be read."""
    found = self._rounds.pop(round_, None)
    if found is not None:
      self._drop(found)

  def handle(self, event: transports.Event) -> bool:
    """Handles an event of the transport; returns whether it was its own."""
    match event:
      case transports.ArrayReceived() | transports.ArraySent():
        sending = isinstance(event, transports.ArraySent)
      case transports.ArrayFailed():
        sending = event.sending
      case _:
        return False
    found = self._transfers.pop((event.peer, event.transfer, sending), None)
    if found is None:
      return False
    round_ = found.round
    if found.is_part and round_.timed is not None:
      # A slice of a gradient has moved, without which there is no mean.
      round_.timed = self._transport.now()
    if isinstance(event, transports.ArrayReceived):
      self._received(found, event.data)
    # A replica that lacks a slice of the mean reports it itself.
    elif isinstance(event, transports.ArrayFailed) and (
      found.is_part or not sending
    ):
      who = round_.parts[found.at].incarnation
      text = f"{'to' if sending else 'from'} it: {event.reason}"
      self._fail(round_, who, text)
    return True

  def check(self) -> None:
    """Gives up transfers without progress; to be called often."""
    now = self._transport.now()
    for round_ in self._rounds.values():
      if round_.timed is None or round_.answered or round_.averaging:
        continue
      mine = [
        (key, found)
        for key, found in self._transfers.items()
        if found.round is round_
      ]
      # Slices of the mean can come only once the gradients have moved.
      is_part = any(found.is_part for _, found in mine)
      what, most = "slice of the mean", self._limits.mean
      if is_part:
        what, most = "gradient", self._limits.transfer
      idle: dict[int, float] = {}
      for (process, number, sending), found in mine:
        if found.is_part == is_part and not sending:
          seconds = self._transport.idle(process, number) or 0.0
          # The rows of a member come in turns.
          since = idle.get(found.at, now - round_.timed)
          idle[found.at] = min(seconds, since)
      for at, seconds in idle.items():
        if seconds > most:
          text = f"no byte of its {what} came for {seconds:.1f} s"
          self._fail(round_, round_.parts[at].incarnation, text)

  # Helpers.

  def _made(self, effect: effects.Aggregate) -> _Round:
    for peer in (*effect.peers, *effect.readers):
      if peer.process != self._transport.name:
        self._transport.connect(peer.process, peer.address)
    total = self._reducer.sum_of(effect.parts)
    made = _Round(
      effect.round,
      total,
      [
        _Part(
          peer.incarnation,
          peer.process,
          [
            _Row(transfer_id("part", effect.round, peer.incarnation, i))
            for i in range(rows)
          ],
          transfer_id("mean", effect.round, peer.incarnation),
        )
        for peer, rows in zip(effect.peers, total.rows, strict=True)
      ],
      self._place.cuts(len(effect.parts)),
      effect.me,
      self._transport.allocate(self._place.nbytes),
      [peer.process for peer in effect.readers],
    )
    if not effect.round.early:
      made.timed = self._transport.now()
    self._rounds[effect.round] = made
    return made

  def _within(self, row: int, low: int, high: int) -> tuple[int, int]:
    """A slice's bytes in a row of the own gradient."""
    start = row * self._place.nbytes
    return start + low, start + high

  def _slice(self, round_: _Round, index: int) -> tuple[int, int]:
    cuts = round_.cuts
    return self._place.bytes_of(cuts[index], cuts[index + 1])

  def _send(
    self,
    to: str,
    number: int,
    data: Sequence[memoryview],
    transfer: _Transfer,
  ) -> None:
    self._transfers[to, number, True] = transfer
    self._transport.send_array(to, number, data)

  def _expect(
    self,
    number: int,
    nbytes: int,
    into: memoryview | None,
    transfer: _Transfer,
  ) -> None:
    process = transfer.round.parts[transfer.at].process
    self._transfers[process, number, False] = transfer
    self._transport.expect(process, number, nbytes, into)

  def _expect_mean(self, round_: _Round, index: int) -> None:
    low, high = self._slice(round_, index)
    part = round_.parts[index]
    if low == high:
      part.has_mean = True
      return
    transfer = _Transfer(round_, index, False)
    self._expect(part.mean, high - low, round_.mean[low:high], transfer)

  def _received(self, transfer: _Transfer, data: memoryview) -> None:
    part = transfer.round.parts[transfer.at]
    if transfer.is_part:
      part.rows[transfer.row].data = data
      self._average(transfer.round)
    else:
      part.has_mean = True
      self._finish(transfer.round)

  def _average(self, round_: _Round) -> None:
    """Averages the own slice once it is here of all gradients."""
    assert round_.me is not None
    members, mine = round_.parts, round_.parts[round_.me]
    if round_.answered or round_.averaging or mine.has_mean:
      return
    others = [member for member in members if member is not mine]
    if any(row.data is None for member in others for row in member.rows):
      return
    assert round_.gradient is not None
    start, stop = round_.cuts[round_.me : round_.me + 2]
    first, last = self._slice(round_, round_.me)
    out = np.frombuffer(round_.mean, np.uint8)[first:last]
    gradients = [
      round_.gradient.read(*self._within(i, first, last))
      if row.data is None
      else np.frombuffer(row.data, np.uint8)
      for member in members
      for i, row in enumerate(member.rows)
    ]

    def work() -> None:
      if start < stop:
        self._reducer.slice(round_.total, gradients, start, stop, out)

    round_.averaging = True
    if sum(g.nbytes for g in gradients) <= _AT_ONCE:
      work()
      self._averaged(round_)
    else:
      self._background(work, lambda: self._averaged(round_))

  def _averaged(self, round_: _Round) -> None:
    """The slice of the mean is there."""
    round_.averaging = False
    self._give_back(round_)
    if round_.answered:
      return
    self._push(round_)
    assert round_.me is not None
    round_.parts[round_.me].has_mean = True
    self._finish(round_)

  def _push(self, round_: _Round) -> None:
    """Sends the averaged slice to all that need it."""
    assert round_.me is not None
    mine = round_.parts[round_.me]
    low, high = self._slice(round_, round_.me)
    if low == high:
      return
    number = mine.mean
    others = [p.process for p in round_.parts if p is not mine]
    self._reach("gather")
    for process in (*others, *round_.readers):
      transfer = _Transfer(round_, round_.me, False)
      self._send(process, number, [round_.mean[low:high]], transfer)

  def _give_back(self, round_: _Round) -> None:
    """Ends reading all gradients."""
    round_.gradient = None
    for part in round_.parts:
      for row in part.rows:
        if row.data:
          row.data = None
          self._transport.release(part.process, row.id)

  def _finish(self, round_: _Round) -> None:
    if not round_.answered and self._has_mean(round_):
      round_.answered = True
      self._answer(messages.Done(round_.id))

  def _has_mean(self, round_: _Round) -> bool:
    return all(part.has_mean for part in round_.parts)

  def _fail(self, round_: _Round, failed_replica: int, reason: str) -> None:
    if not round_.answered:
      round_.answered = True
      failed = messages.Failed(round_.id, failed_replica, reason)
      self._answer(failed)

  def _drop(self, round_: _Round) -> None:
    round_.answered = True
    for key, transfer in list(self._transfers.items()):
      if transfer.round is round_:
        process, number, _ = key
        self._transport.cancel(process, number)
        del self._transfers[key]
    if not round_.averaging:
      self._give_back(round_)
