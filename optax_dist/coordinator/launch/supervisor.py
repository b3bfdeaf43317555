"""Decides which replicas are restarted, and how a launch ends.

A pure state machine: its inputs are events and times, and it returns effects.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable
from typing import TypeAlias


@dataclasses.dataclass(frozen=True)
class ReplicaEnded:
  """A replica's processes have ended.

  Attributes:
    replica: its index.
    code: 0, or that of the process that failed first, negative for a signal.
    reason: how that process ended, in words.
    tail: the last lines of its output.
    name: name of this process, if the replica has several.
  """

  replica: int
  code: int
  reason: str = ""
  tail: str = ""
  name: str = ""

  def __str__(self) -> str:
    return f"{self.name or f'replica {self.replica}'} {self.reason}"


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
class JobEnded:
  """Effect: all replicas have ended, or the run can't continue.

  Attributes:
    code: the exit code of the job.
    reason: why the run can't continue, human-readable; "" if all have ended.
    corrigible: whether the run goes on, so that this launcher's replicas may join once
      their error is corrected.
  """

  code: int
  reason: str = ""
  corrigible: bool = False


Effect: TypeAlias = StartReplica | KillReplica | Say | JobEnded


# Seconds to wait for news of other replicas, once the run is over or a replica has
# ended with an error: if all fail in the same way, restarting is useless.
_SETTLE_TIME = 1.0
# Seconds after which a replica no longer counts as failing repeatedly.
_HEALTHY = 60.0
# Shortest and longest pause before a restart: it doubles while a replica keeps
# failing; the first restart after a signal is immediate.
_PAUSES = 0.5, 30.0
# Seconds after which to warn of a job in which no replica has joined, and of replicas
# that go on after the end of the run.
_USUALLY_JOINED, _USUALLY_ENDED = 120.0, 60.0
# Seconds after which to name a replica that has not joined though others have.
_LATE = 10.0
# Seconds without a failure after which all restarts are allowed again: a job of
# weeks meets more than ten failures that have nothing to do with each other.
_FORGIVEN = 3600.0

_NOBODY = "no replica has joined; does the script call coordinator.join?"


@dataclasses.dataclass(frozen=True)
class Policy:
  """What to do about replicas that end with an error.

  Attributes:
    needed: how many replicas the run needs to continue, on all hosts.
    restarts: how many restarts are allowed, until an hour without a failure has
      passed.
  """

  needed: int = 1
  restarts: int = 10


class State(enum.Enum):
  """The state of a replica."""

  RUNNING = "running"
  WAITING = "waiting for its restart"
  ABSENT = "abandoned"
  DONE = "done"


_SETTLED = (State.DONE, State.ABSENT)


@dataclasses.dataclass
class _Replica:
  state: State = State.RUNNING
  restarts: int = 0
  began: float = 0.0
  due: float = 0.0
  failures: int = 0
  # Since its last start: whether it has joined, and left; the runs that it is in; the
  # error that has ended its part in a run, which its program may hide by ending with
  # 0. `final` is "" if another start may help, "refused" if the run would refuse it
  # again, "final" if the run has ended with an error, and "missed" if the run has ended
  # well without this replica.
  joined: bool = False
  left: bool = False
  runs: set[str] = dataclasses.field(default_factory=set)
  failure: str = ""
  final: str = ""
  # Whether it has joined since its first start.
  has_joined: bool = False
  # When to warn that it has not joined.
  named_at: float = math.inf
  # Whether it has failed by itself, and was not killed; and whether it ended because
  # there was no run to continue.
  fails: bool = False
  cut_off: bool = False
  # The first of its failures in a row, and when it came.
  first: tuple[float, ReplicaEnded] | None = None


class Supervisor:
  """The state machine; see the module docstring.

  Each of its inputs is a method, which is given the time, and returns the effects.
  A program may take part in several runs, after one another or at once.

  Attributes:
    over: whether the run has finished, and no other one goes on.
  """

  def __init__(
    self, replicas: Iterable[int], policy: Policy, elsewhere: int = 0
  ):
    """Starts before any replica was started.

    Args:
      replicas: the replicas of this host.
      policy: what to do about those that end with an error.
      elsewhere: replicas of other hosts: they may be enough, or hold the state.
    """
    self._replicas = {replica: _Replica() for replica in replicas}
    self._policy, self._elsewhere = policy, elsewhere
    self.over = False
    self._finished: set[str] = set()
    self._end_late_at = math.inf
    self._stopped: int | None = None
    self._failed_run = False
    # Exit codes after the run, of replicas that took part in it.
    self._codes: list[int] = []
    self._start = 0.0
    self._asks_at, self._has_ended = math.inf, False
    self._names_at = math.inf
    # Restarts since the last hour without a failure, and the last failure.
    self._restarts = 0
    self._failed_at = -math.inf

  @property
  def never_joined(self) -> frozenset[int]:
    """Replicas that have ended before they ever joined the run."""
    return frozenset(
      number
      for number, replica in self._replicas.items()
      if not replica.has_joined
      and (replica.restarts or replica.state is not State.RUNNING)
    )

  @property
  def coming(self) -> frozenset[int]:
    """Replicas that run, or will, and have never joined the run."""
    if self.over or self._stopped is not None:
      return frozenset()
    return frozenset(
      number
      for number, replica in self._replicas.items()
      if not (replica.has_joined or replica.state in _SETTLED)
    )

  @property
  def has_begun(self) -> bool:
    """Whether any replica of this host has joined the run."""
    return any(r.has_joined for r in self._replicas.values())

  @property
  def all_joined(self) -> bool:
    """Whether all running replicas have joined since they were started."""
    return all(self._joined())

  @property
  def none_joined(self) -> bool:
    """Whether no running replica has joined since it was started."""
    return not any(self._joined())

  def _joined(self) -> list[bool]:
    states = self._replicas.values()
    return [r.joined for r in states if r.state is State.RUNNING]

  def start(self, now: float) -> list[Effect]:
    """The first effects: start all replicas."""
    self._start, self._asks_at = now, now + _USUALLY_JOINED
    for replica in self._replicas.values():
      replica.began = now
    return [StartReplica(number, 0) for number in self._replicas]

  def joined(self, number: int, run: str, now: float) -> list[Effect]:
    """A replica has joined a run."""
    replica = self._replicas[number]
    replica.joined = replica.has_joined = True
    replica.left, replica.failure, replica.final = False, "", ""
    if run not in self._finished:
      replica.runs.add(run)
      self._begin_another(now)
    for other in self._replicas.values():
      other.named_at = min(other.named_at, now + _LATE)
    # Some replicas may have ended, without an error, before any joined.
    return self._conclude(self._restart_due(now) + self._check_enough())

  def left(self, number: int, run: str) -> None:
    """A replica has left a run gracefully, or has been in it until its end."""
    replica = self._replicas[number]
    replica.runs.discard(run)
    replica.left = not replica.runs

  def failed(self, number: int, reason: str, final: str) -> None:
    """A replica's part in a run has ended with an error."""
    replica = self._replicas[number]
    if final == "missed" and replica.left:
      return  # It has called again after the end of a run in which it took part.
    replica.failure, replica.final = reason, final

  def run_over(self, run: str, now: float) -> list[Effect]:
    """A run has finished successfully."""
    self._finished.add(run)
    replicas = self._replicas.values()
    for replica in replicas:
      replica.runs.discard(run)
    if not (self.over or any(replica.runs for replica in replicas)):
      self.over = True
      # The message that a replica has joined may come a little later.
      self._end_late_at = now + _SETTLE_TIME
      self._names_at = now + _USUALLY_ENDED
      self._settle_waiting()
    return self._conclude([])

  def _begin_another(self, now: float) -> None:
    """The programs begin another run: replicas that were cut off are needed again."""
    if not self.over or self._stopped is not None:
      return
    self.over = False
    self._end_late_at = self._names_at = math.inf
    self._codes.clear()
    for replica in self._replicas.values():
      if replica.state is State.DONE and replica.cut_off:
        replica.state, replica.due = State.WAITING, now

  def stop(self, signal: int, now: float) -> list[Effect]:
    """A signal asked the launcher to end; it was passed on."""
    self._stopped = signal
    self._settle_waiting()
    return self._conclude([])

  def ended(self, end: ReplicaEnded, now: float) -> list[Effect]:
    """A replica's processes have ended."""
    replica = self._replicas[end.replica]
    if not end.code:
      reason = _ended_with_0(replica)
      end = dataclasses.replace(end, reason=reason)
    # The end of a replica that came too late for the run is not reported.
    took_part = replica.joined or not self.over
    is_news = bool(end.code) or not (self.over or replica.left)
    says = is_news and took_part and self._stopped is None
    effects = self._decide(end, now)
    if says:
      effects.insert(0, Say(f"{end}"))
    return self._conclude(effects)

  def tick(self, now: float) -> list[Effect]:
    """Some time has passed."""
    effects = self._restart_due(now) + self._end_late(now) + self._ask(now)
    effects += self._name(now) + self._name_late(now)
    return self._conclude(effects)

  # How the job ends.

  def _conclude(self, effects: list[Effect]) -> list[Effect]:
    """Adds the end, once all replicas have ended; nothing follows it."""
    if self._has_ended:
      return []
    if any(isinstance(effect, JobEnded) for effect in effects):
      self._has_ended = True
    elif all(r.state in _SETTLED for r in self._replicas.values()):
      self._has_ended = True
      effects.append(self._end())
    return effects

  def _end(self) -> Effect:
    if self._stopped is not None:
      return JobEnded(128 + self._stopped)
    if self._failed_run and not self.over:
      return self._explain("The run has ended with an error")
    replicas = self._replicas.values()
    if not (self.over or any(r.has_joined or r.left for r in replicas)):
      return JobEnded(
        1,
        f"{_NOBODY} All replicas of this host have ended with exit code 0, and"
        " whatever they have computed, each has done for itself.",
      )
    # A replica that was killed after the run, when all steps were committed, does not
    # fail the job if another one has come to the end of its program.
    errors = [code for code in self._codes if code > 0]
    killed = [] if 0 in self._codes else self._codes
    return JobEnded(exit_code(next(iter(errors + killed), 0)))

  def _ask(self, now: float) -> list[Effect]:
    """Warns once of a job in which no replica has joined."""
    if now < self._asks_at:
      return []
    self._asks_at = math.inf
    if self.over or self.has_begun:
      return []
    return [Say(f"after {now - self._start:.0f} s {_NOBODY}")]

  def _name(self, now: float) -> list[Effect]:
    """Names once the replicas that go on after the end of the run."""
    if now < self._names_at:
      return []
    self._names_at = math.inf
    return [
      Say(
        f"the run has ended {_USUALLY_ENDED:.0f} s ago, and replica {number} goes on:"
        " its program is still at work, or is stuck"
      )
      for number, replica in self._replicas.items()
      if replica.state is State.RUNNING
    ]

  def _name_late(self, now: float) -> list[Effect]:
    """Names replicas that run, and have not joined where others have."""
    effects: list[Effect] = []
    for number, replica in self._replicas.items():
      if now < replica.named_at or replica.state is not State.RUNNING:
        continue
      # Again after twice the time.
      seconds = now - replica.began
      replica.named_at = now + max(_LATE, seconds)
      if not (replica.has_joined or self.over or self._stopped is not None):
        effects.append(
          Say(
            f"replica {number} has not joined, and others have; its process has"
            f" been running for {seconds:.0f} s"
          )
        )
    return effects

  def _end_late(self, now: float) -> list[Effect]:
    """Ends replicas that are too late for the run."""
    effects: list[Effect] = []
    if now < self._end_late_at:
      return effects
    self._end_late_at = math.inf
    for number, replica in self._replicas.items():
      if replica.state is State.RUNNING and not replica.joined:
        replica.state, replica.cut_off = State.DONE, True
        why = "the run has ended, and it had not joined"
        effects.append(Say(f"replica {number} is stopped: {why}"))
        effects.append(KillReplica(number))
    return effects

  def _settle_waiting(self) -> None:
    for replica in self._replicas.values():
      if replica.state is State.WAITING:
        replica.state, replica.cut_off = State.DONE, True

  # Consequences of a replica's end.

  def _decide(self, end: ReplicaEnded, now: float) -> list[Effect]:
    replica, code = self._replicas[end.replica], end.code
    replica.runs.clear()
    if replica.state in _SETTLED:
      return []
    left = replica.left and not code
    if self.over or left or self._stopped is not None:
      replica.state, replica.cut_off = State.DONE, bool(code)
      # The others came too late to take part, or had no part in its end.
      if replica.joined and not replica.failure:
        self._codes.append(code)
      return []
    if replica.final:
      replica.state, replica.first = State.ABSENT, (now, end)
      self._failed_run |= replica.final == "final"
      if replica.final == "refused":
        return [self._explain("The run refuses a replica of this host", True)]
      # For "final", the other replicas get the same error from the run.
      return self._check_enough() if replica.final == "missed" else []
    if not (code or replica.joined or replica.failure):
      # Its program has ended with 0 and never joined: another start would be the same.
      replica.state, replica.first = State.ABSENT, (now, end)
      return self._check_enough() if self.has_begun else []
    replica.state = State.WAITING
    if now - self._failed_at >= _FORGIVEN:
      self._restarts = 0
    self._failed_at = now
    if now - replica.began > _HEALTHY:
      replica.failures = 0
    replica.failures += 1
    if replica.failures == 1:
      replica.first = now, end
    replica.due = now + _pause(replica.failures, code)
    replica.fails = code >= 0
    others = [r for r in self._replicas.values() if r.state is not State.DONE]
    if not self._elsewhere and all(
      r.state is State.ABSENT or (r.state is State.WAITING and r.fails)
      for r in others
    ):
      # All other replicas have failed, too, and would fail again.
      return [self._explain("No replica is left")]
    return self._restart_due(now)

  def _restart_due(self, now: float) -> list[Effect]:
    effects: list[Effect] = []
    for number, replica in self._replicas.items():
      if replica.state is not State.WAITING or replica.due > now:
        continue
      most = self._policy.restarts
      if self._restarts < most:
        self._restarts += 1
        replica.restarts += 1
        replica.state, replica.began = State.RUNNING, now
        replica.joined = replica.left = replica.cut_off = False
        replica.failure = replica.final = ""
        count = f"restart {self._restarts} of {most}"
        effects.append(Say(f"replica {number} starts again ({count})"))
        effects.append(StartReplica(number, replica.restarts))
        continue
      left = f"no restart is left of {most}"
      effects.append(Say(f"replica {number} does not start again: {left}"))
      replica.state = State.ABSENT
      given_up = self._check_enough()
      if given_up:
        return effects + given_up
    return effects

  def _check_enough(self) -> list[Effect]:
    """Ends a run of which too few replicas are left."""
    left = sum(r.state is not State.ABSENT for r in self._replicas.values())
    needed = max(1, self._policy.needed - self._elsewhere)
    if left >= needed or self.over or self._stopped is not None:
      return []
    return [self._explain(f"Only {left} of {needed} needed replicas can go on")]

  def _explain(self, what: str, corrigible: bool = False) -> JobEnded:
    """Names the replica because of which the run can't go on here."""
    states = State.WAITING, State.ABSENT
    down = [r for r in self._replicas.values() if r.state in states]
    firsts = [replica.first for replica in down if replica.first is not None]
    # The first failure is named, since later ones often follow from it.
    when, cause = min(firsts, key=lambda first: first[0])
    seconds = when - self._start
    text = f"{what}: {cause} after {seconds:.1f} s."
    if cause.tail:
      text += f" The last lines of its output:\n{cause.tail}"
    text += (
      "\nCorrect that, and start this launcher again."
      if corrigible or not self.has_begun
      else "\nTo go on, start the job again from its last checkpoint."
    )
    return JobEnded(exit_code(cause.code) or 1, text, corrigible)


def _pause(failures: int, code: int) -> float:
  """Seconds before a restart.

  Args:
    failures: how often the replica has failed in a row.
    code: its exit code.
  """
  settle = _SETTLE_TIME if code >= 0 else 0.0
  if failures == 1:
    return settle
  shortest, longest = _PAUSES
  return max(settle, min(longest, shortest * 2.0 ** min(failures - 2, 30)))


def _ended_with_0(replica: _Replica) -> str:
  """How a replica has ended, as seen from the run."""
  if replica.failure:
    return f"has ended with exit code 0 after an error ({replica.failure})"
  if replica.joined and not replica.left:
    return "ended with exit code 0, and has not left the run"
  return "ended with exit code 0" + (
    "" if replica.joined else ", and has not joined the run"
  )


def exit_code(code: int) -> int:
  """A process's exit code, as in a shell.

  Example:
    >>> exit_code(3), exit_code(-9)
    (3, 137)
  """
  return code if code >= 0 else 128 - code
