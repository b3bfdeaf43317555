"""Members average their gradients: reduce-scatter, then gather.

Of k members each averages one slice of every gradient, in the order of the round,
and pushes the mean to all members and readers. A member moves 2P(k-1)/k bytes in
each direction, plus a slice for each reader; a reader takes P in. Slices are cut
into pieces that fit into a core's cache: one piece is averaged and pushed while the
next ones are being received. The first gradient's piece is received into the memory of
the mean, and the pieces of the other gradients are added to it there.

A failed round is kept until it is cancelled: if its transfers ended at once,
peers that wait for the same bytes would consider this replica failed.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from optax_dist.coordinator.aggregation.reducer import Reducer, Sum
from optax_dist.coordinator.aggregation.scattered import Scattered
from optax_dist.coordinator.protocol import (
  deadlines,
  effects,
  entries,
  inputs,
  messages,
)
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport import sockets

# Bytes of a gradient that are averaged at once, in about a millisecond.
PIECE = 4 << 20


# Runs the first in another thread, and then the second, or what raises the error of
# the first, in this one.
Background: TypeAlias = Callable[
  [Callable[[], None], Callable[[], None] | None], None
]


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


class _Member(NamedTuple):
  """One member of a round.

  Attributes:
    incarnation: its membership.
    process: its process.
    rows: the indices of its arrays among those of all members: one array, or one for
      each node of a tree.
  """

  incarnation: int
  process: str
  rows: range


@dataclasses.dataclass
class _Piece:
  """A range of the mean that one member averages at once.

  Attributes:
    number: its place among all.
    owner: the member that averages it.
    elements: its first element, and the one after its last.
    low: its first byte.
    high: the byte after its last.
    rows: of the piece that this replica averages: its bytes of each array that is
      here, perhaps in the memory of another process.
  """

  number: int
  owner: int
  elements: tuple[int, int]
  low: int
  high: int
  rows: dict[int, memoryview] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass
class _Round:
  """An aggregation.

  Attributes:
    id: its id.
    total: how the gradients are added up.
    members: whose gradients they are, in order.
    pieces: the pieces of the mean, in order.
    me: which member this replica is; None for a reader.
    mean: memory for the whole mean; None once this replica no longer needs it.
    readers: processes that fetch the mean besides.
    missing: how many pieces of the mean are missing.
    gradient: this replica's own, until its slice is averaged.
    timed: since when its deadlines count; None while it may wait for gradients that
      are still being computed.
    answered: whether the core has its answer, or no longer needs one.
  """

  id: entries.RoundId
  total: Sum
  members: list[_Member]
  pieces: list[_Piece]
  me: int | None
  mean: memoryview | None
  readers: list[str]
  missing: int
  gradient: Scattered | None = None
  timed: float | None = None
  answered: bool = False

  @property
  def own(self) -> list[_Piece]:
    """The pieces that this replica averages."""
    return [piece for piece in self.pieces if piece.owner == self.me]


class _Transfer(NamedTuple):
  """A transfer under way.

  Attributes:
    round: the round that it is part of.
    member: the other side; this replica for a piece of the mean that is sent.
    piece: which piece it is.
    row: index of its array in the sum; None for a piece of the mean.
  """

  round: _Round
  member: int
  piece: _Piece
  row: int | None


class Aggregations:
  """One replica's side of all aggregations, over a `Transport`.

  The thread that owns the transport calls everything.

  Attributes:
    rounds: the rounds that have not been dropped.
  """

  def __init__(
    self,
    transport: sockets.Transport,
    reducer: Reducer,
    limits: deadlines.Deadlines,
    answer: Callable[[inputs.Input], None],
    reach: Callable[[str], None] = lambda phase: None,
  ):
    """Makes one without rounds.

    Args:
      transport: connections to the others.
      reducer: averages the slices of this replica.
      limits: how long a round may go on without a byte.
      answer: takes inputs for the protocol core.
      reach: called at each phase, "reduce_scatter" and "gather".
    """
    self._transport = transport
    self._reducer, self._layout = reducer, reducer.layout
    self._limits = limits
    self._answer = answer
    self._reach = reach
    self.rounds: dict[entries.RoundId, _Round] = {}
    # Transfers by peer, transfer id, and whether this replica sends.
    self._transfers: dict[tuple[str, int, bool], _Transfer] = {}

  def begin(
    self, effect: effects.Aggregate, gradient: Scattered | None = None
  ) -> None:
    """Takes part in an aggregation: with a gradient, or as a reader."""
    round_ = self._made(effect)
    if gradient is None or effect.me is None:
      self._reach("gather")
      for piece in round_.pieces:
        self._expect_mean(round_, piece)
    else:
      round_.gradient = gradient
      self._reach("reduce_scatter")
      # Memory for all rows of others but the first, which has the mean's.
      others = sum(round_.total.rows) - len(round_.members[effect.me].rows)
      more = max(0, others - 1)
      size = sum(piece.high - piece.low for piece in round_.own)
      spare = self._transport.allocate(more * size)
      for piece in round_.pieces:
        if piece.owner == effect.me:
          used = more * (piece.high - piece.low)
          self._expect_gradients(round_, piece, spare[:used])
          spare = spare[used:]
        else:
          self._send_gradient(round_, piece, gradient)
          self._expect_mean(round_, piece)
      for piece in round_.own:
        self._average(round_, piece)
    self._finish(round_)

  def mean(self, round_: entries.RoundId) -> np.ndarray:
    """The bytes of a received mean."""
    memory = self.rounds[round_].mean
    assert memory is not None
    return np.frombuffer(memory, np.uint8)

  def applied(self, step: int) -> None:
    """The state is that of a step: no mean before it is read here any more."""
    for round_ in self.rounds.values():
      # The transport keeps the memory of pieces that are still being sent.
      if round_.id.step < step and not round_.missing:
        round_.mean = None

  def drop(self, round_: entries.RoundId) -> None:
    """Executes `Release`: ends a round, whose mean may still be read."""
    dropped = self.rounds.pop(round_, None)
    if dropped is None:
      return
    dropped.answered = True
    for key, transfer in list(self._transfers.items()):
      if transfer.round is dropped:
        process, number, _ = key
        self._transport.cancel(process, number)
        del self._transfers[key]
    for piece in dropped.own:
      self._give_back(dropped, piece)

  def handle(self, event: transports.Event) -> bool:
    """Handles an event of the transport; returns whether it was its own."""
    match event:
      case transports.ArrayReceived() | transports.ArraySent():
        sending = isinstance(event, transports.ArraySent)
      case transports.ArrayFailed():
        sending = event.sending
      case _:
        return False
    transfer = self._transfers.pop((event.peer, event.transfer, sending), None)
    if transfer is None:
      return False
    round_, is_part = transfer.round, transfer.row is not None
    if is_part and round_.timed is not None:
      # A piece of a gradient has moved, without which there is no mean.
      round_.timed = self._transport.now()
    if isinstance(event, transports.ArrayReceived):
      self._received(transfer, event.data)
    # A replica that lacks a piece of the mean reports it itself.
    elif isinstance(event, transports.ArrayFailed) and (is_part or not sending):
      who = round_.members[transfer.member].incarnation
      text = f"{'to' if sending else 'from'} it: {event.reason}"
      self._fail(round_, who, text)
    return True

  def check(self) -> None:
    """Gives up transfers without progress; to be called often."""
    now = self._transport.now()
    for round_ in self.rounds.values():
      if round_.timed is None or round_.answered:
        continue
      mine = [
        (key, transfer)
        for key, transfer in self._transfers.items()
        if transfer.round is round_
      ]
      # Pieces of the mean can arrive only after the gradients, so as long as a gradient
      # is missing, that is what the round waits for.
      is_part = any(transfer.row is not None for _, transfer in mine)
      what, most = "slice of the mean", self._limits.mean
      if is_part:
        what, most = "gradient", self._limits.transfer
      idle: dict[int, float] = {}
      for (process, number, sending), transfer in mine:
        if (transfer.row is not None) == is_part and not sending:
          seconds = self._transport.idle(process, number) or 0.0
          # A member's pieces arrive one after the other, so the latest one counts.
          since = idle.get(transfer.member, now - round_.timed)
          idle[transfer.member] = min(seconds, since)
      for member, seconds in idle.items():
        if seconds > most:
          text = f"no byte of its {what} came for {seconds:.1f} s"
          self._fail(round_, round_.members[member].incarnation, text)

  # Helpers.

  def _made(self, effect: effects.Aggregate) -> _Round:
    for peer in (*effect.peers, *effect.readers):
      if peer.process != self._transport.name:
        self._transport.connect(peer.process, peer.address)
    total = self._reducer.sum_of(effect.parts)
    members: list[_Member] = []
    rows: collections.Counter[int] = collections.Counter()
    for part, count in zip(effect.parts, total.rows, strict=True):
      rows[part.incarnation] += count
    first = 0
    for peer in effect.peers:
      own = range(first, first := first + rows[peer.incarnation])
      members.append(_Member(peer.incarnation, peer.process, own))
    pieces = self._pieces(len(members))
    made = _Round(
      effect.round,
      total,
      members,
      pieces,
      effect.me,
      self._transport.allocate(self._layout.nbytes),
      [peer.process for peer in effect.readers],
      len(pieces),
    )
    if not effect.round.early:
      made.timed = self._transport.now()
    self.rounds[effect.round] = made
    return made

  def _pieces(self, members: int) -> list[_Piece]:
    """The pieces of the mean that are not empty: as many for each member."""
    each = max(1, -(-self._layout.nbytes // (members * PIECE)))
    cuts = self._layout.cuts(members * each)
    pieces = []
    for number, elements in enumerate(itertools.pairwise(cuts)):
      low, high = self._layout.bytes_of(*elements)
      if low < high:
        owner = number // each
        pieces.append(_Piece(number, owner, elements, low, high))
    return pieces

  def _send(
    self,
    to: str,
    number: int,
    data: Sequence[memoryview],
    transfer: _Transfer,
  ) -> None:
    self._transfers[to, number, True] = transfer
    self._transport.send_array(to, number, data)

  def _expect(self, number: int, into: memoryview, transfer: _Transfer) -> None:
    process = transfer.round.members[transfer.member].process
    self._transfers[process, number, False] = transfer
    # A mean is one array: its pieces are copied.
    in_place = transfer.row is not None
    self._transport.expect(process, number, into, in_place)

  def _send_gradient(
    self, round_: _Round, piece: _Piece, gradient: Scattered
  ) -> None:
    """Sends a piece of the own gradient to the member that averages it."""
    assert round_.me is not None
    for row in round_.members[round_.me].rows:
      data = gradient.parts(*self._within(round_, piece, row))
      transfer = _Transfer(round_, piece.owner, piece, row)
      number = _part_id(round_, piece, row)
      self._send(round_.members[piece.owner].process, number, data, transfer)

  def _within(self, round_: _Round, piece: _Piece, row: int) -> tuple[int, int]:
    """The bytes of a piece in the own gradient, whose rows follow each other."""
    assert round_.me is not None
    start = (row - round_.members[round_.me].rows.start) * self._layout.nbytes
    return start + piece.low, start + piece.high

  def _expect_gradients(
    self, round_: _Round, piece: _Piece, spare: memoryview
  ) -> None:
    """Expects a piece that this replica averages, of all other members.

    Args:
      round_: the round.
      piece: the piece.
      spare: memory for all members' pieces but the first.
    """
    assert round_.mean is not None
    # The first is one of the first two rows, of which the sum is written there.
    into, size = round_.mean[piece.low : piece.high], piece.high - piece.low
    for index, member in enumerate(round_.members):
      for row in member.rows if index != round_.me else ():
        number = _part_id(round_, piece, row)
        self._expect(number, into, _Transfer(round_, index, piece, row))
        into, spare = spare[:size], spare[size:]

  def _expect_mean(self, round_: _Round, piece: _Piece) -> None:
    assert round_.mean is not None
    into = round_.mean[piece.low : piece.high]
    number = _mean_id(round_, piece)
    self._expect(number, into, _Transfer(round_, piece.owner, piece, None))

  def _received(self, transfer: _Transfer, data: memoryview) -> None:
    round_, piece = transfer.round, transfer.piece
    if transfer.row is None:
      round_.missing -= 1
      self._finish(round_)
    else:
      piece.rows[transfer.row] = data
      self._average(round_, piece)

  def _average(self, round_: _Round, piece: _Piece) -> None:
    """Averages a piece once all gradients' pieces are here, and pushes the mean."""
    if round_.answered:
      return
    assert round_.me is not None
    assert round_.mean is not None
    assert round_.gradient is not None
    own = round_.members[round_.me].rows
    rows = sum(round_.total.rows)
    if len(piece.rows) + len(own) < rows:
      return
    gradients = [
      round_.gradient.read(*self._within(round_, piece, row))
      if row in own
      else np.frombuffer(piece.rows[row], np.uint8)
      for row in range(rows)
    ]
    memory = round_.mean[piece.low : piece.high]
    out = np.frombuffer(memory, np.uint8)
    self._reducer.slice(round_.total, gradients, *piece.elements, out)
    del gradients
    self._give_back(round_, piece)
    self._reach("gather")
    processes = [m.process for m in round_.members if m.rows is not own]
    for process in (*processes, *round_.readers):
      transfer = _Transfer(round_, round_.me, piece, None)
      self._send(process, _mean_id(round_, piece), [memory], transfer)
    round_.missing -= 1
    self._finish(round_)

  def _give_back(self, round_: _Round, piece: _Piece) -> None:
    """Ends reading the gradients of others."""
    rows, piece.rows = piece.rows, {}
    for member in round_.members:
      for row in member.rows:
        if row in rows:
          number = _part_id(round_, piece, row)
          self._transport.release(member.process, number)

  def _finish(self, round_: _Round) -> None:
    if round_.missing == 0:
      round_.gradient = None
      if not round_.answered:
        round_.answered = True
        self._answer(messages.Done(round_.id))

  def _fail(self, round_: _Round, failed_replica: int, reason: str) -> None:
    if not round_.answered:
      round_.answered = True
      failed = messages.Failed(round_.id, failed_replica, reason)
      self._answer(failed)


def _part_id(round_: _Round, piece: _Piece, row: int) -> int:
  return transfer_id("part", round_.id, row, piece.number)


def _mean_id(round_: _Round, piece: _Piece) -> int:
  return transfer_id("mean", round_.id, piece.number)
