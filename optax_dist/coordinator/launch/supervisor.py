"""Decides which replicas are restarted, and how a launch ends.

A pure state machine: it takes one input and the time, and returns effects.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Sequence
from typing import TypeAlias


@dataclasses.dataclass(frozen=True)
class Joined:
  """Input: a replica has joined the run."""

  replica: int


@dataclasses.dataclass(frozen=True)
class Left:
  """Input: a replica has left the run gracefully."""

  replica: int


@dataclasses.dataclass(frozen=True)
class RunOver:
  """Input: the run has finished successfully."""


@dataclasses.dataclass(frozen=True)
class ReplicaEnded:
  """Input: a replica's processes have ended.

  Attributes:
    replica: its index.
    code: 0, or that of the process that failed first, negative for a signal.
    words: how that process ended.
    tail: the last lines of its output.
    process: the name of that process.
    failure: the error that ended its part in the run, if its program has hidden
      it by ending with 0.
    final: "" if it may do better next time, "refused" if the run would refuse it
      again, "final" if the run has ended with an error.
  """

  replica: int
  code: int
  words: str = ""
  tail: str = ""
  process: str = ""
  failure: str = ""
  final: str = ""


@dataclasses.dataclass(frozen=True)
class LauncherStops:
  """Input: a signal asked the launcher to end; it was passed on."""

  number: int


@dataclasses.dataclass(frozen=True)
class Tick:
  """Input: some time has passed."""


Input: TypeAlias = Joined | Left | RunOver | ReplicaEnded | LauncherStops | Tick


@dataclasses.dataclass(frozen=True)
class StartReplica:
  """Effect: start a replica.

  Attributes:
    replica: its index.
    restarts: how often it was started before.
  """

  replica: int
  restarts: int


@dataclasses.dataclass(frozen=True)
class KillReplica:
  """Effect: kill a replica's processes; no `ReplicaEnded` follows."""

  replica: int


@dataclasses.dataclass(frozen=True)
class Say:
  """Effect: tell people something.

  Attributes:
    line: what to tell them.
  """

  line: str


@dataclasses.dataclass(frozen=True)
class GiveUpRun:
  """Effect: the run can't continue.

  Attributes:
    reason: explanation for people.
    code: the exit code of what failed.
    corrigible: whether the run goes on, and its replicas may come once people have
      corrected what is wrong with them.
  """

  reason: str
  code: int = 1
  corrigible: bool = False


@dataclasses.dataclass(frozen=True)
class JobEnded:
  """Effect: all replicas have ended.

  Attributes:
    code: the exit code of the job.
  """

  code: int


Effect: TypeAlias = StartReplica | KillReplica | Say | GiveUpRun | JobEnded


# Seconds to wait for news of the others, once the run is over or a replica has
# ended with an error: if all fail in the same way, restarting is useless.
_SETTLE_TIME = 1.0
# Seconds after which a replica no longer counts as failing repeatedly.
_HEALTHY = 60.0
# Seconds after which a job in which nobody has joined is asked about.
_USUALLY_JOINED = 120.0
# Seconds without a failure after which all restarts are allowed again: a job of
# weeks meets more than ten failures that have nothing to do with each other.
_FORGIVEN = 3600.0

_NOBODY = "no replica has joined; does the script call coordinator.join?"


@dataclasses.dataclass(frozen=True)
class Policy:
  """What to do about replicas that end with an error.

  Attributes:
    needed: how many replicas the run needs to continue.
    restarts: how many restarts are allowed, until an hour without a failure has
      passed.
    pauses: shortest and longest pause before a restart, in seconds: it doubles
      while a replica keeps failing; the first restart after a signal is
      immediate.
    whole: whether all replicas of the run are here: if all of them fail by
      themselves, they would again.
  """

  needed: int = 1
  restarts: int = 10
  pauses: tuple[float, float] = (0.5, 30.0)
  whole: bool = True


class State(enum.Enum):
  """The state of a replica."""

  RUNNING = "running"
  WAITING = "waiting for its restart"
  ABSENT = "abandoned"
  DONE = "done"


_SETTLED = (State.DONE, State.ABSENT)


@dataclasses.dataclass
class _Place:
  state: State = State.RUNNING
  restarts: int = 0
  began: float = 0.0
  due: float = 0.0
  failures: int = 0
  # Since it was started last: whether it has joined, and left.
  joined: bool = False
  left: bool = False
  # Ever.
  has_joined: bool = False
  has_ended: bool = False
  # Whether it has failed by itself, and was not killed.
  fails: bool = False
  # The first of its failures in a row, and when it came.
  first: tuple[float, ReplicaEnded] | None = None


class Supervisor:
  """The state machine; see the module docstring.

  Attributes:
    over: whether the run has finished.
  """

  def __init__(self, replicas: Iterable[int], policy: Policy):
    """Starts before any replica was started.

    Args:
      replicas: the replicas of this host.
      policy: what to do about those that end with an error.
    """
    self._places = {replica: _Place() for replica in replicas}
    self._policy = policy
    self.over = False
    self._end_late_at = math.inf
    self._stopped: int | None = None
    self._failed_run = False
    # The first error after the run, the first signal that killed a replica
    # then, and whether any replica has ended well.
    self._code = self._killed = 0
    self._ended_well = False
    self._ended = False
    self._start = 0.0
    self._asked = False
    # Restarts since the last hour without a failure, and the last failure.
    self._restarts = 0
    self._failed = -math.inf

  def state(self, replica: int) -> State:
    """The state of a replica."""
    return self._places[replica].state

  @property
  def never_joined(self) -> frozenset[int]:
    """Replicas that have ended before they ever joined the run."""
    return frozenset(
      replica
      for replica, place in self._places.items()
      if place.has_ended and not place.has_joined
    )

  def start(self, now: float) -> list[Effect]:
    """The first effects: start all replicas."""
    self._start = now
    for place in self._places.values():
      place.began = now
    return [StartReplica(replica, 0) for replica in self._places]

  def step(self, given: Input, now: float) -> list[Effect]:
    """Processes an input; returns the effects."""
    if self._ended:
      return []
    effects = self._process(given, now)
    if any(isinstance(e, GiveUpRun) for e in effects):
      self._ended = True
      return effects
    if all(p.state in _SETTLED for p in self._places.values()):
      self._ended = True
      effects.append(self._end())
    return effects

  def _end(self) -> Effect:
    """How the job ends, once all replicas have."""
    if self._stopped is not None:
      return JobEnded(128 + self._stopped)
    if self._failed_run and not self.over:
      return self._explain("The run has ended with an error")
    places = self._places.values()
    if not (self.over or any(p.has_joined or p.left for p in places)):
      return GiveUpRun(
        f"{_NOBODY} All replicas of this host have ended with exit code 0, and"
        " whatever they have computed, each has done for itself."
      )
    # One that was killed after the run, with all steps committed, changes nothing
    # if another one has come to the end of its program.
    return JobEnded(self._code or (0 if self._ended_well else self._killed))

  def _process(self, given: Input, now: float) -> list[Effect]:
    match given:
      case Joined(replica):
        place = self._places[replica]
        place.joined = place.has_joined = True
        place.left = False
        # Some may have ended well before anybody joined.
        return self._check_enough()
      case Left(replica):
        self._places[replica].left = True
      case RunOver():
        self._run_over(now)
      case LauncherStops(number):
        self._stopped = number
        self._settle_waiting()
      case ReplicaEnded():
        return self._replica_ended(given, now)
      case Tick():
        return self._restart_due(now) + self._end_late(now) + self._ask(now)
    return []

  def _ask(self, now: float) -> list[Effect]:
    """Asks once about a job in which nobody has joined."""
    if self._asked or now - self._start < _USUALLY_JOINED:
      return []
    self._asked = True
    places = self._places.values()
    if self.over or any(place.has_joined for place in places):
      return []
    return [Say(f"after {now - self._start:.0f} s {_NOBODY}")]

  def _run_over(self, now: float) -> None:
    if not self.over:
      self.over = True
      # The message that a replica has joined may come a little later.
      self._end_late_at = now + _SETTLE_TIME
      self._settle_waiting()

  def _end_late(self, now: float) -> list[Effect]:
    """Ends replicas that are too late for the run."""
    if now < self._end_late_at:
      return []
    self._end_late_at = math.inf
    late = [
      replica
      for replica, place in self._places.items()
      if place.state is State.RUNNING and not place.joined
    ]
    effects: list[Effect] = []
    for replica in late:
      self._places[replica].state = State.DONE
      why = "the run has ended, and it had not joined"
      effects.append(Say(f"replica {replica} is stopped: {why}"))
      effects.append(KillReplica(replica))
    return effects

  def _settle_waiting(self) -> None:
    for place in self._places.values():
      if place.state is State.WAITING:
        place.state = State.DONE

  def _replica_ended(self, given: ReplicaEnded, now: float) -> list[Effect]:
    place = self._places[given.replica]
    place.has_ended = True
    if not given.code:
      given = dataclasses.replace(given, words=_ended_with_0(given, place))
    # Those that came too late for the run are no news.
    took_part = place.joined or not self.over
    is_news = bool(given.code) or not (self.over or place.left)
    says = is_news and took_part and self._stopped is None
    effects = self._decide(given, now)
    if says:
      effects.insert(0, Say(f"replica {given.replica} {given.words}"))
    return effects

  def _decide(self, given: ReplicaEnded, now: float) -> list[Effect]:
    """Decides what follows from the end of a replica."""
    place, code = self._places[given.replica], given.code
    if place.state in _SETTLED:
      return []
    left = place.left and not code
    if self.over or left or self._stopped is not None:
      place.state = State.DONE
      if place.joined:  # The others came too late to take part.
        self._ended_well |= not code
        self._code = self._code or max(0, code)
        self._killed = self._killed or exit_code(min(0, code))
      return []
    if given.final:
      place.state, place.first = State.ABSENT, (now, given)
      self._failed_run |= given.final == "final"
      if given.final == "refused":
        return [self._explain("The run refuses a replica of this host", True)]
      return []  # The others are told the same.
    if not (code or place.joined or given.failure):
      # If it were started again, it would end in the same way.
      place.state, place.first = State.ABSENT, (now, given)
      joined = any(p.has_joined for p in self._places.values())
      return self._check_enough() if joined else []
    place.state = State.WAITING
    if now - self._failed >= _FORGIVEN:
      self._restarts = 0
    self._failed = now
    if now - place.began > _HEALTHY:
      place.failures = 0
    place.failures += 1
    if place.failures == 1:
      place.first = now, given
    place.due = now + self._pause(place, code)
    place.fails = code >= 0
    others = [p for p in self._places.values() if p.state is not State.DONE]
    if self._policy.whole and all(
      p.state is State.ABSENT or (p.state is State.WAITING and p.fails)
      for p in others
    ):
      return [self._explain("No replica is left")]
    return self._restart_due(now)

  def _pause(self, place: _Place, code: int) -> float:
    least, most = self._policy.pauses
    settle = _SETTLE_TIME if code >= 0 else 0.0
    if place.failures == 1:
      return settle
    pause = least * 2.0 ** min(place.failures - 2, 30)
    return max(settle, min(most, pause))

  def _restart_due(self, now: float) -> list[Effect]:
    effects: list[Effect] = []
    for replica, place in self._places.items():
      if place.state is not State.WAITING or place.due > now:
        continue
      if self._restarts < self._policy.restarts:
        self._restarts += 1
        place.restarts += 1
        place.state, place.began = State.RUNNING, now
        place.joined = place.left = False
        count = f"restart {self._restarts} of {self._policy.restarts}"
        effects.append(Say(f"replica {replica} starts again ({count})"))
        effects.append(StartReplica(replica, place.restarts))
        continue
      left = f"no restart is left of {self._policy.restarts}"
      effects.append(Say(f"replica {replica} does not start again: {left}"))
      given_up = self._give_up(replica)
      if given_up:
        return effects + given_up
    return effects

  def _give_up(self, replica: int) -> list[Effect]:
    """Goes on without a replica, if enough are left."""
    self._places[replica].state = State.ABSENT
    return self._check_enough()

  def _check_enough(self) -> list[Effect]:
    """Ends a run of which too few replicas are left."""
    left = sum(p.state is not State.ABSENT for p in self._places.values())
    needed = self._policy.needed
    if left >= needed or self.over or self._stopped is not None:
      return []
    return [self._explain(f"{left} replicas are left of {needed} needed")]

  def _explain(self, what: str, corrigible: bool = False) -> GiveUpRun:
    """Names the replica because of which the run can't go on here."""
    states = State.WAITING, State.ABSENT
    down = [p for p in self._places.values() if p.state in states]
    firsts = [place.first for place in down if place.first is not None]
    if not firsts:  # They never started.
      return GiveUpRun(f"{what}.")
    when, cause = _cause(firsts)
    seconds = when - self._start
    told = (
      f"{what}: replica {cause.replica} {cause.words} after {seconds:.1f} s."
    )
    if cause.tail:
      told += f" The last lines of its output:\n{cause.tail}"
    told += (
      "\nCorrect that, and start this launcher again."
      if corrigible
      else "\nTo go on, start the job again from its last checkpoint."
    )
    return GiveUpRun(told, exit_code(cause.code) or 1, corrigible)


def _cause(
  firsts: Sequence[tuple[float, ReplicaEnded]],
) -> tuple[float, ReplicaEnded]:
  """The failure that explains the others.

  Args:
    firsts: of each replica the first of its failures in a row, and when it came.
      What a replica raises after a restart often follows from that: the run is
      over, or its store is gone.
  """
  start, first = min(firsts, key=lambda found: found[0])
  # A replica that was killed makes others fail at nearly the same time.
  for when, ended in firsts:
    if (
      exit_code(first.code) <= 128 < exit_code(ended.code) and when < start + 1
    ):
      return when, ended
  return start, first


def _ended_with_0(given: ReplicaEnded, place: _Place) -> str:
  """How a replica has ended, as seen from the run."""
  if given.failure:
    return f"has ended with exit code 0 after an error ({given.failure})"
  if place.joined and not place.left:
    return "ended with exit code 0, and has not left the run"
  return "ended with exit code 0" + (
    "" if place.joined else ", and has not joined the run"
  )


def exit_code(code: int) -> int:
  """A process's exit code, as in a shell.

  Example:
    >>> exit_code(3), exit_code(-9)
    (3, 137)
  """
  return code if code >= 0 else 128 - code
