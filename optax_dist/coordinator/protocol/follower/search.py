"""A replica without a leader: finds the leader, or becomes it.

A member that has lost the leader asks the other members whether they have too.
If all have, the first of them claims leadership at once; if some can't be
reached, it waits until the store has shown no heartbeat of a leader for
`Deadlines.pace`. So a replica that is cut off from all others but not from the
store deposes no leader.

To claim leadership is to put a `Term` at the next position of the log, and then
to read on there, whatever the store answers: the log decides.
"""

from __future__ import annotations

import dataclasses
import math
from typing import NamedTuple, TypeAlias

from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.effects import (
  Connect,
  Effect,
  Get,
  Put,
  Send,
)
from optax_dist.coordinator.protocol.entries import (
  Beat,
  Incarnation,
  Process,
  Record,
  Term,
)
from optax_dist.coordinator.protocol.inputs import GetAnswered, PutAnswered
from optax_dist.coordinator.protocol.log import (
  LEADER_KEY,
  Count,
  FellOff,
  LogRead,
  LogReader,
  record_key,
)
from optax_dist.coordinator.protocol.membership import Start, View
from optax_dist.coordinator.protocol.messages import Canvass
from optax_dist.ledger import Progress

# Seconds between the claims of replicas that could all claim at once.
_TURN = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class LeaderFound:
  """A process that is leader, according to the store."""

  process: Process
  address: str


@dataclasses.dataclass(frozen=True, slots=True)
class StartAt:
  """The log must be read from here; what was read before is obsolete."""

  position: int


Finding: TypeAlias = LeaderFound | StartAt | LogRead | FellOff


class Situation(NamedTuple):
  """What the search needs to know about its replica.

  Attributes:
    view: the view at `position`.
    position: position of the next record; -1 if it has read none.
    complete: whether the view has all decisions.
    me: the incarnation of its membership; -1 for none.
    holds: whether it has the latest state.
    start: its start state, or None.
  """

  view: View
  position: int
  complete: bool
  me: int
  holds: bool
  start: Start | None


class Search:
  """Looks for a leader from `begin` until `end`.

  Attributes:
    active: whether it is searching.
    unreachable: processes that were thought to be leader and could not be
      called, or could not be kept, with the time until which they are not
      called again.
  """

  def __init__(self, config: Config, count: Count):
    self._config, self._count = config, count
    self._limits = config.deadlines
    self._reader = LogReader(config.block, count)
    self.active = False
    self.unreachable: dict[Process, float] = {}
    self._beat: Beat | None = None
    self._lost_at = self._heard = 0.0
    self._votes: dict[Incarnation, bool] = {}
    self._fresh: set[Incarnation] = set()
    self._canvass_at = math.inf
    self._look_at = math.inf
    self._hint_request = -1
    self._at_end = False
    # Whether the log is known to continue beyond this replica's position.
    self._behind = False
    # Whether a known leader has yet to be called: then none is deposed.
    self._trusting = False
    # The put of a claim that has no answer yet.
    self._claim = -1

  @property
  def idle(self) -> bool:
    """Whether there is a leader, and no claim in progress."""
    return self._claim < 0 and not self.active

  def begin(self, now: float, when: float | None = None) -> None:
    """The leader is lost: starts to search, now or at a later time."""
    if not self.active:
      self._heard = now
    self.active, self._trusting = True, False
    self._votes = {}
    self._fresh = set()
    self._at_end = False
    self._lost_at = now if when is None else when
    self._canvass_at = self._look_at = self._lost_at

  def trust(self) -> None:
    """The log names a new leader, which is being called."""
    self._trusting = True

  def end(self) -> None:
    """Stops: there is a leader."""
    self.active = self._behind = False
    self.unreachable.clear()
    self._reader.stop()
    self._hint_request = -1

  def heard(self, now: float) -> None:
    """There is a leader, or was a moment ago."""
    self._heard = now

  def may_call(self, process: Process, now: float) -> bool:
    """Whether to call a supposed leader, some time after the last try."""
    return self.active and now >= self.unreachable.get(process, 0.0)

  def replaced(self, process: Process, view: View) -> bool:
    """Whether the store names a later leader than this process."""
    beat = self._beat
    return beat is not None and beat.term > view.term and beat.leader != process

  def voted(self, incarnation: Incarnation, hears: bool) -> None:
    """A member still has the leader, or has lost it as well."""
    self._votes[incarnation] = hears
    self._fresh.add(incarnation)

  def deadline(self, situation: Situation) -> float:
    """When `proceed` must be called."""
    if self._claim >= 0 or not self.active:
      return math.inf
    times = [self._claim_at(situation)]
    if self._hint_request < 0 and not self._reader.busy:
      times.append(self._look_at)
    if situation.me >= 0 and not self._trusting:
      times.append(self._canvass_at)
    return min(times)

  def proceed(self, now: float, situation: Situation) -> list[Effect]:
    """Does what is due."""
    if self._claim >= 0 or not self.active:
      return []
    effects: list[Effect] = []
    if situation.me >= 0 and now >= self._canvass_at and not self._trusting:
      self._canvass_at = now + self._limits.pace / 2
      # Members that have not answered since the last time may be dead by now.
      self._votes = {i: v for i, v in self._votes.items() if i in self._fresh}
      self._fresh.clear()
      effects += self._canvass(situation)
    idle = self._hint_request < 0 and not self._reader.busy
    if now >= self._claim_at(situation):
      self._reader.stop()
      self._hint_request = -1
      fresh = situation.me < 0 and not situation.holds
      effects.append(self._begin_claim(situation, fresh))
    elif idle and now >= self._look_at:
      self._look_at = math.inf
      self._hint_request = self._count()
      effects.append(Get(self._hint_request, LEADER_KEY))
    return effects

  def take_over(self, situation: Situation, fresh: bool) -> list[Effect]:
    """Claims leadership that the leader hands over.

    If the leader puts another record first, nothing has happened.
    """
    anew = situation.view.untouched and situation.start is not None
    if not self.idle or (fresh and not anew):
      return []
    return [self._begin_claim(situation, fresh)]

  def pause(self, now: float) -> None:
    """Asks the store again after a pause."""
    self._look_at = now + self._limits.pace / 8

  def _others(self, situation: Situation) -> list[Incarnation]:
    view = situation.view
    return [
      i
      for i, member in view.members.items()
      if i != situation.me and member.process != view.leader
    ]

  def _canvass(self, situation: Situation) -> list[Effect]:
    effects: list[Effect] = []
    for incarnation in self._others(situation):
      member = situation.view.members[incarnation]
      effects.append(Connect(member.process, member.address))
      effects.append(Send(member.process, Canvass(situation.view.term)))
    return effects

  def _claim_at(self, situation: Situation) -> float:
    """When this replica may claim leadership, as far as is known."""
    view, me = situation.view, situation.me
    silence = self._limits.pace
    if view.ended is not None or self._trusting or self._behind:
      return math.inf
    if me < 0:
      # Perhaps all members are dead, and a process with the latest state may
      # continue. Until the first commit, all start states are equivalent.
      starts = view.untouched and situation.start is not None
      knows = situation.complete or situation.position == 0
      if not (self._at_end and knows and (situation.holds or starts)):
        return math.inf
      return self._heard + (2 * silence if situation.position else 0.0)
    others = self._others(situation)
    turn = _TURN * sum(i < me for i in others)
    votes = [self._votes.get(i) for i in others]
    if True in votes:
      return math.inf
    if None in votes:
      return self._heard + silence + turn
    return self._lost_at + turn

  def _begin_claim(self, situation: Situation, fresh: bool) -> Effect:
    config, view = self._config, situation.view
    start = situation.start if fresh else None
    # A fresh start has members of its own.
    member = None if fresh else view.members.get(situation.me)
    term = Term(
      view.term + 1,
      config.process,
      config.address,
      fresh,
      view.next_incarnation if member is None else member.incarnation,
      config.replica,
      view.step if start is None else start.step,
      "" if start is None else start.digest,
      Progress() if start is None else start.progress,
      () if start is None else start.lineage,
    )
    self._claim = self._count()
    record = Record(term.term, (term,))
    return Put(self._claim, record_key(situation.position), record)

  def put_answered(
    self, answer: PutAnswered, now: float, situation: Situation
  ) -> list[Effect]:
    """Looks in the log for who has become leader."""
    if answer.request != self._claim:
      return []
    self._claim = -1
    self._at_end, self._behind = False, self.active
    if answer.answer == "unknown":
      # If it takes effect all the same, the log will show it.
      self.pause(now)
      return []
    return [self._reader.read(situation.position)]

  def get_answered(
    self, answer: GetAnswered, now: float, situation: Situation
  ) -> tuple[list[Effect], list[Finding]]:
    """Continues with an answer of the store."""
    if answer.request == self._hint_request:
      self._hint_request = -1
      return self._hinted(answer, now, situation)
    result = self._reader.answered(answer)
    match result:
      case None:
        return [], []
      case Get():
        return [result], []
      case "unknown":
        self.pause(now)
        return [], []
      case FellOff():
        self._look_at = now
        return [], [result]
    if result.records:
      self._heard = now
    self._at_end = result.end
    if result.end:
      self._behind = False
      self.pause(now)
    else:
      self._look_at = now
    return [], [result]

  def _hinted(
    self, answer: GetAnswered, now: float, situation: Situation
  ) -> tuple[list[Effect], list[Finding]]:
    if not answer.known:
      self.pause(now)
      return [], []
    beat = answer.value if isinstance(answer.value, Beat) else None
    found: list[Finding] = []
    position = situation.position
    if beat is not None:
      if self._beat not in (None, beat):
        self._heard = now
      self._beat = beat
      known = situation.complete and beat.term <= situation.view.term
      reachable = self.may_call(beat.leader, now)
      # What a new leader has read must be read here as well: it may include the
      # means of missed steps.
      if reachable and (not situation.complete or (known and situation.me < 0)):
        found.append(LeaderFound(beat.leader, beat.address))
      if position < 0 and beat.leader not in self.unreachable:
        self.pause(now)
        return [], found
    if position < 0:
      position = 0 if beat is None else beat.position
      found.append(StartAt(position))
    return [self._reader.read(position)], found
