"""When a fragment is merged, of whose contributions, with which weights.

Nobody waits here: learners train on, and tell what they have. Each fragment has
rounds of its own. The learner whose turn it is first begins a round, and all others
are called for what they have by then: were each to give at a turn of its own, a
fragment would be merged several times in a period, each time by some, and what the
others bring afterwards would be old. A round is merged once a quorum is in it, all
live learners are, or the grace window after the quorum is over. The window is a share
of the slack: of the time that the learners train on anyway before they take the result
in.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

Learner = str | int


class Config(NamedTuple):
  """What stays the same for a whole run.

  Attributes:
    fragments: how many there are.
    period: the fastest learner's steps between two rounds of a fragment.
    quorum: contributions that a merge takes at least.
    overlap: steps for which a learner trains on until it takes a merge in.
    safety: the share of the slack that the grace window may take, from 0 to 1.
    late: whether a contribution that missed its round is carried into the next, at
      a lower weight, or dropped.
    max_staleness: rounds by which one that is carried may be late.
  """

  fragments: int
  period: int
  quorum: int = 1
  overlap: int = 1
  safety: float = 0.8
  late: Literal["carry", "drop"] = "carry"
  max_staleness: int = 1


class Reason(enum.Enum):
  """Why a contribution is dropped."""

  UNKNOWN_LEARNER = "its learner has not joined"
  SUPERSEDED = "its learner has sent a newer one, which has all of it"
  STALE = "too many rounds were merged since it began"
  LOST = "its learner is gone"


class Join(NamedTuple):
  """A learner begins, with the current fragments; again after it was lost."""

  learner: Learner


class Leave(NamedTuple):
  """A learner has left, or is lost."""

  learner: Learner


class Contribute(NamedTuple):
  """A learner has a fragment to give.

  Attributes:
    learner: whose it is.
    fragment: which one.
    version: of the fragment that the learner began from.
    tokens: that it has trained on since.
    steps: that it has made since.
    step_seconds: how long one of its steps takes.
  """

  learner: Learner
  fragment: int
  version: int
  tokens: int
  steps: int
  step_seconds: float


class Merged(NamedTuple):
  """The members of a round have merged it.

  Attributes:
    fragment: which one.
    attempt: of the :class:`Merge`.
  """

  fragment: int
  attempt: int


class Tick(NamedTuple):
  """Time has passed; due at :func:`deadline`."""


Event = Join | Leave | Contribute | Merged | Tick


class Merge(NamedTuple):
  """The members are to merge a fragment among themselves.

  Attributes:
    fragment: which one.
    attempt: its number; never the same again.
    members: learners with their weights, which add up to 1.
  """

  fragment: int
  attempt: int
  members: tuple[tuple[Learner, float], ...]


class Call(NamedTuple):
  """A round has begun: these learners are to give what they have, too."""

  fragment: int
  learners: tuple[Learner, ...]


class Abort(NamedTuple):
  """A member of this merge is gone; the others are to leave it off."""

  fragment: int
  attempt: int


class Adopt(NamedTuple):
  """A new version of a fragment is there, for all learners to take in."""

  fragment: int
  version: int
  members: tuple[Learner, ...]


class Drop(NamedTuple):
  """A contribution comes to nothing."""

  contribution: Contribute
  reason: Reason


Decision = Merge | Call | Abort | Adopt | Drop


class Round(NamedTuple):
  """What is known of one fragment.

  Attributes:
    version: merges so far.
    inside: contributions that are not merged, at most one of a learner.
    began: when the first came that is not late, and the others were called; None:
      none has come so far, and what is inside waits for it.
    closes: when the grace window ends; None before the quorum is there.
    merging: contributions that are being merged now.
    attempt: of that merge; 0 for none.
    merge_began: when it did.
    merge_seconds: how long the last merge took.
  """

  version: int = 0
  inside: tuple[Contribute, ...] = ()
  began: float | None = None
  closes: float | None = None
  merging: tuple[Contribute, ...] = ()
  attempt: int = 0
  merge_began: float = 0.0
  merge_seconds: float = 0.0


class State(NamedTuple):
  """All that the rules remember; a value, never changed in place.

  Attributes:
    config: as given.
    learners: those that are live, in the order of their joining.
    rounds: one of each fragment.
    attempts: merges that were ever begun.
    step_seconds: the latest of each live learner that has sent it.
  """

  config: Config
  learners: tuple[Learner, ...]
  rounds: tuple[Round, ...]
  attempts: int
  step_seconds: tuple[tuple[Learner, float], ...]


def init(config: Config) -> State:
  """The state before anyone has joined.

  Args:
    config: the numbers of the run.

  Returns:
    The state.

  Raises:
    ValueError: a number is out of range.

  Example:
    >>> state = init(Config(fragments=2, period=4))
    >>> state, _ = step(state, Join("a"), 0.0)
    >>> state, decisions = step(state, Contribute("a", 0, 0, 512, 4, 0.1), 1.0)
    >>> decisions
    (Merge(fragment=0, attempt=1, members=(('a', 1.0),)),)

  References:
    Douillard et al. 2026, `Decoupled DiLoCo
    <https://arxiv.org/abs/2604.21428>`_.
  """
  for name, least in (
    ("fragments", 1),
    ("period", 1),
    ("quorum", 1),
    ("overlap", 0),
    ("max_staleness", 0),
  ):
    value = getattr(config, name)
    if type(value) is not int or value < least:
      raise ValueError(
        f"{name} must be an integer from {least}, got {value!r}."
      )
  if not 0 <= config.safety <= 1:
    raise ValueError(f"safety must be from 0 to 1, got {config.safety!r}.")
  if config.late not in ("carry", "drop"):
    raise ValueError(f"late must be 'carry' or 'drop', got {config.late!r}.")
  return State(config, (), (Round(),) * config.fragments, 0, ())


def turn(config: Config, fragment: int) -> int:
  """A learner's steps from the turn of the fragment before to that of this one.

  Those of all fragments are a period, so that their turns are spread over it, as
  of ``streaming_updates``.

  Example:
    >>> [turn(Config(fragments=3, period=10), fragment) for fragment in range(3)]
    [3, 3, 4]
  """
  at = lambda n: n * config.period // config.fragments
  return at(fragment + 1) - at(fragment)


def clocks(config: Config) -> list[int]:
  """What a learner's clock of each fragment shows at the start of a run.

  A clock counts the learner's steps since it gave the fragment, or took it in
  where it gave nothing; at a whole period it is the fragment's turn.

  Example:
    >>> clocks(Config(fragments=2, period=4))
    [2, 0]
  """
  turns = (turn(config, fragment) for fragment in range(config.fragments))
  return [config.period - steps for steps in itertools.accumulate(turns)]


def token_weight(tokens: int, steps: int) -> float:
  """What a contribution counts for: its tokens, times its tokens in a step.

  The first is how much there is in it, the second how good each step was.

  Example:
    >>> token_weight(tokens=1000, steps=10)
    100000.0
  """
  return tokens * (tokens / steps)


def shares(contributions: Iterable[tuple[int, int, int]]) -> list[float]:
  """What each contribution to a merge counts for; they add up to 1.

  Args:
    contributions: tokens, steps, and by how many rounds it is late, of each.

  Example:
    >>> shares([(1000, 4, 0), (1000, 4, 1)])
    [0.6666666666666666, 0.3333333333333333]
  """
  weights = [token_weight(t, n) / (1 + late) for t, n, late in contributions]
  total = math.fsum(weights)
  # Where nobody has seen a token, all count alike.
  return [w / total if total else 1 / len(weights) for w in weights]


def grace_window(
  config: Config,
  step_seconds: Iterable[float],
  waited: float,
  merge_seconds: float,
) -> float:
  """Seconds for which to wait beyond the quorum, without anyone waiting.

  Args:
    config: of the run.
    step_seconds: how long a step of each live learner takes.
    waited: since the first contribution to the round.
    merge_seconds: how long the merge will take, about.

  Example:
    >>> config = Config(fragments=2, period=4, overlap=2, safety=0.5)
    >>> grace_window(config, [1.0, 3.0], waited=0.5, merge_seconds=0.5)
    0.5
  """
  # The fastest is the first to need the result.
  fastest = min(step_seconds, default=0.0)
  slack = config.overlap * fastest - waited - merge_seconds
  return config.safety * max(0.0, slack)


def deadline(state: State) -> float | None:
  """When to call :func:`step` with a :class:`Tick`; None: no need."""
  closing = [r.closes for r in state.rounds if r.closes is not None]
  return min(closing, default=None)


def step(
  state: State, event: Event, now: float
) -> tuple[State, tuple[Decision, ...]]:
  """Applies one event.

  Args:
    state: before it.
    event: what has happened.
    now: when, in seconds; never less than before.

  Returns:
    The state after it, and what is to be done.

  Raises:
    ValueError: a contribution has no such fragment or version, no steps, or
      negative tokens.
  """
  decisions: list[Decision] = []
  match event:
    case Join(learner):
      if learner in state.learners:
        state = _leave(state, learner, decisions)
      state = state._replace(learners=(*state.learners, learner))
    case Leave(learner):
      if learner in state.learners:
        state = _leave(state, learner, decisions)
    case Contribute():
      state = _contribute(state, event, now, decisions)
    case Merged(fragment, attempt):
      state = _merged(state, fragment, attempt, now, decisions)
    case Tick():
      pass
  for fragment in range(state.config.fragments):
    state = _close(state, fragment, now, decisions)
  return state, tuple(decisions)


def _put(state: State, fragment: int, this: Round) -> State:
  rounds = (*state.rounds[:fragment], this, *state.rounds[fragment + 1 :])
  return state._replace(rounds=rounds)


def _leave(state: State, learner: Learner, decisions: list[Decision]) -> State:
  """Takes out all that is a learner's; others of its merges come back."""
  for fragment, this in enumerate(state.rounds):
    inside, merging, attempt = this.inside, this.merging, this.attempt
    if any(c.learner == learner for c in merging):
      decisions.append(Abort(fragment, attempt))
      # A learner that has sent a newer one since gives that.
      newer = {c.learner for c in inside}
      for old in merging:
        if old.learner in newer and old.learner != learner:
          decisions.append(Drop(old, Reason.SUPERSEDED))
      back = tuple(
        c for c in merging if c.learner not in newer or c.learner == learner
      )
      inside, merging, attempt = (*back, *inside), (), 0
    lost = [c for c in inside if c.learner == learner]
    decisions.extend(Drop(c, Reason.LOST) for c in lost)
    inside = tuple(c for c in inside if c.learner != learner)
    this = this._replace(inside=inside, merging=merging, attempt=attempt)
    if len(inside) < state.config.quorum:
      this = this._replace(closes=None)
    if not inside and not merging:
      this = this._replace(began=None)
    state = _put(state, fragment, this)
  return state._replace(
    learners=tuple(m for m in state.learners if m != learner),
    step_seconds=tuple(x for x in state.step_seconds if x[0] != learner),
  )


def _contribute(
  state: State, new: Contribute, now: float, decisions: list[Decision]
) -> State:
  if not 0 <= new.fragment < state.config.fragments:
    raise ValueError(f"There is no fragment {new.fragment!r}.")
  this = state.rounds[new.fragment]
  if not 0 <= new.version <= this.version:
    raise ValueError(
      f"Fragment {new.fragment} has versions up to {this.version}, got"
      f" {new.version!r}."
    )
  if new.steps < 1 or new.tokens < 0 or not new.step_seconds >= 0:
    raise ValueError(f"A contribution needs steps, got {new}.")
  if new.learner not in state.learners:
    decisions.append(Drop(new, Reason.UNKNOWN_LEARNER))
    return state
  others = [x for x in state.step_seconds if x[0] != new.learner]
  state = state._replace(
    step_seconds=(*others, (new.learner, new.step_seconds))
  )
  if _is_stale(state.config, this, new):
    decisions.append(Drop(new, Reason.STALE))
    return state
  older = [c for c in this.inside if c.learner == new.learner]
  decisions.extend(Drop(c, Reason.SUPERSEDED) for c in older)
  inside = (*(c for c in this.inside if c.learner != new.learner), new)
  this = this._replace(inside=inside)
  if this.began is None and not this.merging and new.version == this.version:
    this = this._replace(began=now)
    called = tuple(m for m in state.learners if m != new.learner)
    if called:
      decisions.append(Call(new.fragment, called))
  return _put(state, new.fragment, this)


def _is_stale(config: Config, this: Round, one: Contribute) -> bool:
  most = config.max_staleness if config.late == "carry" else 0
  return this.version - one.version > most


def _merged(
  state: State,
  fragment: int,
  attempt: int,
  now: float,
  decisions: list[Decision],
) -> State:
  this = state.rounds[fragment]
  if not attempt or this.attempt != attempt:
    return state  # Of a merge that was aborted.
  members = tuple(c.learner for c in this.merging)
  this = this._replace(
    version=this.version + 1,
    began=None,
    merging=(),
    attempt=0,
    merge_seconds=now - this.merge_began,
  )
  decisions.append(Adopt(fragment, this.version, members))
  stale = [c for c in this.inside if _is_stale(state.config, this, c)]
  decisions.extend(Drop(c, Reason.STALE) for c in stale)
  inside = tuple(c for c in this.inside if c not in stale)
  this = this._replace(inside=inside)
  return _put(state, fragment, this)


def _grace(state: State, this: Round, now: float) -> float:
  seconds = [seconds for _, seconds in state.step_seconds]
  waited = 0.0 if this.began is None else now - this.began
  return grace_window(state.config, seconds, waited, this.merge_seconds)


def _close(
  state: State, fragment: int, now: float, decisions: list[Decision]
) -> State:
  """Begins the merge of a round, if it is time."""
  this = state.rounds[fragment]
  # What is late waits for the next round, and does not begin it.
  waits = this.merging or this.began is None
  if waits or len(this.inside) < state.config.quorum:
    return state
  if this.closes is None:
    this = this._replace(closes=now + _grace(state, this, now))
  everyone = len(this.inside) == len(state.learners)
  if not everyone and this.closes is not None and now < this.closes:
    return _put(state, fragment, this)
  attempt = state.attempts + 1
  found = shares(
    (c.tokens, c.steps, this.version - c.version) for c in this.inside
  )
  members = tuple(
    (c.learner, share) for c, share in zip(this.inside, found, strict=True)
  )
  decisions.append(Merge(fragment, attempt, members))
  this = this._replace(
    inside=(),
    closes=None,
    merging=this.inside,
    attempt=attempt,
    merge_began=now,
  )
  return _put(state._replace(attempts=attempt), fragment, this)
