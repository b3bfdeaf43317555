"""The rules for merging fragments: when, which contributions, which weights.

No learner waits: learners train on, and report what they have. Each fragment
has its own rounds. The learner whose turn comes first begins a round, and all
others are called to contribute what they have by then: if each contributed at
its own turn, a fragment would be merged several times in a period, each time by
a few, and later contributions would be stale. A round is merged once it has a
quorum and either all live learners are in it or the grace window after the
quorum is over. The window is a share of the slack: of the time that the
learners train on anyway before they mix in the result.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterable
from typing import Literal, NamedTuple

Learner = str | int


class Config(NamedTuple):
  """The configuration of a run.

  Attributes:
    fragments: the number of fragments.
    period: the fastest learner's steps between two rounds of a fragment.
    quorum: the smallest number of contributions to merge.
    overlap: steps that a learner trains on before it mixes in a merge.
    safety: the share of the slack that the grace window may use, from 0 to 1.
    late: whether a contribution that missed its round is carried into the next,
      with a lower weight, or dropped.
    max_staleness: largest staleness of a carried contribution, in rounds.
  """

  fragments: int
  period: int
  quorum: int = 1
  overlap: int = 1
  safety: float = 0.8
  late: Literal["carry", "drop"] = "carry"
  max_staleness: int = 1


class Reason(enum.Enum):
  """Why a contribution was dropped."""

  UNKNOWN_LEARNER = "its learner has not joined"
  SUPERSEDED = "its learner has sent a newer one, which has all of it"
  STALE = "too many rounds were merged since it began"
  LOST = "its learner is gone"


class Join(NamedTuple):
  """A learner joins, with the current fragments; again after it was lost."""

  learner: Learner


class Leave(NamedTuple):
  """A learner has left, or was lost."""

  learner: Learner


class Contribute(NamedTuple):
  """A learner contributes to a fragment.

  Attributes:
    learner: the learner.
    fragment: the fragment.
    version: the fragment's version that the learner started from.
    tokens: tokens it has trained on since.
    steps: steps it has taken since.
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
    fragment: the fragment.
    attempt: the number of the :class:`Merge`.
  """

  fragment: int
  attempt: int


class Tick(NamedTuple):
  """Time has advanced; due at :func:`deadline`."""


Event = Join | Leave | Contribute | Merged | Tick


class Merge(NamedTuple):
  """The members should merge a fragment.

  Attributes:
    fragment: the fragment.
    attempt: its unique number.
    members: learners with their weights, which add up to 1.
  """

  fragment: int
  attempt: int
  members: tuple[tuple[Learner, float], ...]


class Call(NamedTuple):
  """A round has begun: these learners should contribute what they have, too."""

  fragment: int
  learners: tuple[Learner, ...]


class Abort(NamedTuple):
  """A member of this merge is lost; the others should abort it."""

  fragment: int
  attempt: int


class Adopt(NamedTuple):
  """There is a new version of a fragment, for all learners to mix in."""

  fragment: int
  version: int
  members: tuple[Learner, ...]


class Drop(NamedTuple):
  """A contribution is dropped."""

  contribution: Contribute
  reason: Reason


Decision = Merge | Call | Abort | Adopt | Drop


class Round(NamedTuple):
  """The state of one fragment.

  Attributes:
    version: merges so far.
    inside: contributions that are not merged yet, at most one per learner.
    began: when the first fresh contribution came, and the others were called;
      None: there was none so far, and the contributions inside wait for one.
    closes: when the grace window ends; None before there is a quorum.
    merging: contributions being merged.
    attempt: the number of that merge; 0 for none.
    merge_began: when it began.
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
  """The state of the rules; an immutable value.

  Attributes:
    config: the configuration.
    learners: the live learners, in the order in which they joined.
    rounds: one round per fragment.
    attempts: number of merges begun so far.
    step_seconds: the last value reported by each live learner.
  """

  config: Config
  learners: tuple[Learner, ...]
  rounds: tuple[Round, ...]
  attempts: int
  step_seconds: tuple[tuple[Learner, float], ...]


def init(config: Config) -> State:
  """The state before any learner has joined.

  Args:
    config: the configuration of the run.

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
  """A learner's steps between the turns of the previous fragment and this one.

  All fragments together take one period, so that their turns are spread over
  it, as in ``streaming_updates``.

  Example:
    >>> [turn(Config(fragments=3, period=10), fragment) for fragment in range(3)]
    [3, 3, 4]
  """
  at = lambda n: n * config.period // config.fragments
  return at(fragment + 1) - at(fragment)


def clocks(config: Config) -> list[int]:
  """The initial value of a learner's clock for each fragment.

  A clock counts the learner's steps since it contributed the fragment, or mixed
  it in without having contributed; after a whole period it is the fragment's
  turn.

  Example:
    >>> clocks(Config(fragments=2, period=4))
    [2, 0]
  """
  turns = (turn(config, fragment) for fragment in range(config.fragments))
  return [config.period - steps for steps in itertools.accumulate(turns)]


def token_weight(tokens: int, steps: int) -> float:
  """The weight of a contribution: its tokens, times its tokens per step.

  The first is the amount of training, the second the quality of each step.

  Example:
    >>> token_weight(tokens=1000, steps=10)
    100000.0
  """
  return tokens * (tokens / steps)


def shares(contributions: Iterable[tuple[int, int, int]]) -> list[float]:
  """The weight of each contribution to a merge; they add up to 1.

  Args:
    contributions: tokens, steps, and staleness in rounds of each.

  Example:
    >>> shares([(1000, 4, 0), (1000, 4, 1)])
    [0.6666666666666666, 0.3333333333333333]
  """
  weights = [token_weight(t, n) / (1 + late) for t, n, late in contributions]
  total = math.fsum(weights)
  # Without any tokens, all weights are equal.
  return [w / total if total else 1 / len(weights) for w in weights]


def grace_window(
  config: Config,
  step_seconds: Iterable[float],
  waited: float,
  merge_seconds: float,
) -> float:
  """Seconds to wait after the quorum, without delaying any learner.

  Args:
    config: the configuration of the run.
    step_seconds: the step time of each live learner.
    waited: seconds since the first contribution to the round.
    merge_seconds: estimated time of the merge.

  Example:
    >>> config = Config(fragments=2, period=4, overlap=2, safety=0.5)
    >>> grace_window(config, [1.0, 3.0], waited=0.5, merge_seconds=0.5)
    0.5
  """
  # The fastest learner needs the result first.
  fastest = min(step_seconds, default=0.0)
  slack = config.overlap * fastest - waited - merge_seconds
  return config.safety * max(0.0, slack)


def deadline(state: State) -> float | None:
  """When to call :func:`step` with a :class:`Tick`; None if not needed."""
  closing = [r.closes for r in state.rounds if r.closes is not None]
  return min(closing, default=None)


def step(
  state: State, event: Event, now: float
) -> tuple[State, tuple[Decision, ...]]:
  """Applies one event.

  Args:
    state: the state before it.
    event: the event.
    now: the time, in seconds; must not decrease.

  Returns:
    The state after it, and the decisions.

  Raises:
    ValueError: a contribution has an unknown fragment or version, no steps, or
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
  """Removes a learner; the others in its merges contribute again."""
  for fragment, this in enumerate(state.rounds):
    inside, merging, attempt = this.inside, this.merging, this.attempt
    if any(c.learner == learner for c in merging):
      decisions.append(Abort(fragment, attempt))
      # A learner that has sent a newer contribution since uses that one.
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
    return state  # The merge was aborted.
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
  """Begins the merge of a round, if it is due."""
  this = state.rounds[fragment]
  # A stale contribution waits for the next round, and does not begin it.
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
