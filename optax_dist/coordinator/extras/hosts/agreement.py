"""Compares hosts' settings; starts replicas on several hosts as a whole.

Launchers of one job that were started with different settings end, and so does
one that runs as a host that has a launcher already. The launchers of a
replica's hosts coordinate through their notices (`notices`): the first host
decides, by the same rules as for its own replicas (`supervisor`), and starts
the replica once the launchers of all its hosts are there; the others follow. A
process that dies on any host ends the replica on all of them, and so does a
host that is silent for too long. A pure state machine: it takes one input and
the time, and returns effects.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from optax_dist.coordinator.extras.hosts.nodes import Place
from optax_dist.coordinator.extras.hosts.notices import (
  Notice,
  Part,
  Plan,
  Stage,
)
from optax_dist.coordinator.launch.supervisor import (
  CannotStart,
  GiveUpRun,
  KillReplica,
  LauncherStops,
  ReplicaEnded,
  RunOver,
  Settled,
  SignalReplica,
  StartReplica,
  Tick,
)
from optax_dist.coordinator.protocol import codec


@dataclasses.dataclass(frozen=True)
class Heard:
  """Input: a host's notice was read.

  Attributes:
    host: its index.
    notice: its notice; None if it has not written one.
  """

  host: int
  notice: Notice | None


@dataclasses.dataclass(frozen=True)
class LauncherEnds:
  """Input: this launcher ends, and its processes with it.

  Attributes:
    words: the reason, for people; "" if the run is over.
  """

  words: str


# A `StartReplica` is a decision of this host, for all hosts; a `ReplicaEnded`
# is about this host's processes only.
Input: TypeAlias = (
  Heard
  | LauncherEnds
  | StartReplica
  | KillReplica
  | ReplicaEnded
  | Settled
  | RunOver
  | LauncherStops
  | Tick
)

# A `StartReplica` starts this host's processes; a `ReplicaEnded`, `CannotStart`
# or `RunOver` is about the replica or run as a whole, for the supervisor.
Effect: TypeAlias = (
  StartReplica
  | KillReplica
  | SignalReplica
  | ReplicaEnded
  | CannotStart
  | RunOver
  | GiveUpRun
)


class Patience(NamedTuple):
  """How long hosts wait for each other, in seconds.

  Attributes:
    meet: initial wait for all hosts of a replica.
    silence: how long a host may be silent; and how long to wait for it to come
      back.
  """

  meet: float = 300.0
  silence: float = 60.0


# Seconds after which a notice that doesn't change is of a launcher that ended.
_SETTLED = 1.5


@dataclasses.dataclass
class _Host:
  """The last known state of another host."""

  notice: Notice | None = None
  asked: bool = False
  # When its notice last changed: an unchanged one may be from an earlier
  # launch.
  changed: float = -math.inf


@dataclasses.dataclass
class _Replica:
  place: Place
  wanted: StartReplica | None = None
  until: float = 0.0  # Deadline of `wanted`, or for its first host.
  plan: Plan | None = None  # Set if this host decides.
  part: Part | None = None
  settled: bool = False
  signalled: bool = False
  closing: bool = False  # Done elsewhere.

  @property
  def runs(self) -> bool:
    """Whether it has processes on this host."""
    return self.part is not None and self.part.stage == Stage.RUNS


class Agreement:
  """The state machine; see the module docstring.

  Attributes:
    writes: whether this launcher may write its notice: not before it knows that
      no other launcher writes under the same key.

  Example:
    >>> places = [Place(0, range(1), range(2))]
    >>> first = Agreement(0, "a", places, Patience(), now=0.0)
    >>> first.step(StartReplica(0, 0, "10.0.0.1:29500"), 0.0)
    []
    >>> first.step(Heard(1, None), 1.0)
    []
    >>> first.step(Heard(1, Notice("b")), 2.0)
    [StartReplica(replica=0, restarts=0, address='10.0.0.1:29500')]
    >>> second = Agreement(1, "b", [Place(0, range(1, 2), range(2))], Patience(), 0.0)
    >>> second.step(Heard(0, None), 2.0)
    []
    >>> second.step(Heard(0, first.notice), 2.2)
    [StartReplica(replica=0, restarts=0, address='10.0.0.1:29500')]
    >>> second.step(ReplicaEnded(0, -9, "process 1 was ended by SIGKILL"), 9.0)
    []
    >>> first.step(Heard(1, second.notice), 9.2)[0]
    KillReplica(replica=0)
  """

  def __init__(
    self,
    host: int,
    launcher: str,
    places: Iterable[Place],
    patience: Patience,
    now: float,
    hosts: Iterable[int] = (),
    settings: Iterable[tuple[str, str]] = (),
    process: str = "",
  ):
    """Starts without knowledge of other hosts.

    Args:
      host: the index of this host.
      launcher: the unique name of this launcher.
      places: the replicas that this host shares with others.
      patience: how long hosts wait for each other.
      now: the time.
      hosts: more hosts whose settings are compared with those of this one.
      settings: the settings that must be the same on all hosts, by flag.
      process: where this launcher runs, for people.
    """
    self._host, self._launcher, self._patience = host, launcher, patience
    self._settings, self._process = tuple(settings), process
    # The notice of another launcher under this host's key, and since when.
    self._before: Notice | None = None
    self._before_since = now
    self.writes = False
    self._replicas = {
      p.replica: _Replica(p, until=now + patience.meet) for p in places
    }
    shared = [h for p in self._replicas.values() for h in p.place.hosts]
    self._others = {h: _Host() for h in (*shared, *hosts) if h != host}
    self._written = self._over = False
    self._signal = 0

  @property
  def hosts(self) -> list[int]:
    """The hosts whose notices it reads, including this one."""
    return sorted([self._host, *self._others])

  @property
  def notice(self) -> Notice:
    """The notice for the others; the writer adds the beat."""
    every = self._replicas.values()
    return Notice(
      self._launcher,
      over=self._over,
      signal=self._signal,
      plans=tuple(r.plan for r in every if r.plan is not None),
      parts=tuple(r.part for r in every if r.part is not None),
      settings=self._settings,
      process=self._process,
    )

  def step(self, given: Input, now: float) -> list[Effect]:
    """Processes an input; returns the effects."""
    effects: list[Effect] = []
    match given:
      case Heard(host, notice) if host == self._host:
        effects += self._read_own(notice, now)
      case Heard(host, notice):
        effects += self._hear(self._others[host], notice, now)
      case StartReplica(replica, restarts):
        one = self._replicas[replica]
        wait = self._patience.silence if restarts else self._patience.meet
        one.wanted, one.until = given, now + wait
      case ReplicaEnded(replica):
        effects += self._ended(self._replicas[replica], given)
      case KillReplica(replica):
        effects += self._end_unwanted(self._replicas[replica])
      case Settled(replica, words):
        self._settle(self._replicas[replica], words)
      case LauncherEnds(words):
        for one in self._replicas.values():
          if one.runs:
            self._ended(one, ReplicaEnded(one.place.replica, 1, words))
          if self._decides(one):
            self._settle(one, words)
        return []
      case RunOver():
        self._over = True
        effects += self._close()
      case LauncherStops(number):
        self._signal = number
        effects += self._close()
    for one in self._replicas.values():
      if not one.settled:
        if self._decides(one):
          effects += self._decide(one, now)
        else:
          effects += self._follow(one, now)
        effects += self._pass_on(one)
    return effects

  def _settle(self, one: _Replica, words: str) -> None:
    """Tells the other hosts that a replica is not started again."""
    one.wanted, one.settled = None, True
    plan = one.plan or Plan(one.place.replica, 0, "", ())
    if plan.stage in (Stage.DONE, Stage.ABSENT):
      return
    stage = Stage.ABSENT if words else Stage.DONE
    one.plan = codec.replace(plan, stage=stage, words=words)

  def _decides(self, one: _Replica) -> bool:
    return one.place.hosts[0] == self._host

  def _read_own(self, notice: Notice | None, now: float) -> list[Effect]:
    if notice is None:
      self.writes = True
      return []
    if notice.launcher == self._launcher:
      self._written = True
      return []
    before, self._before = self._before, notice
    if before is None or before.launcher != notice.launcher:
      self._before_since = now
      lives = self._written  # Both have begun at the same time.
    else:
      lives = notice.beat > before.beat
      self.writes |= now - self._before_since >= _SETTLED
    if not lives:
      return []  # It may be of an earlier launcher of this host.
    self.writes = False
    return [
      GiveUpRun(
        f"Two launchers say that they are on host {self._host}: this one"
        f" ({self._process}) and another ({notice.process}). Give each host a"
        " --node-rank of its own, and start one launcher there."
      )
    ]

  def _hear(
    self, other: _Host, notice: Notice | None, now: float
  ) -> list[Effect]:
    before, asked = other.notice, other.asked
    other.asked = True
    if notice is None:
      return []
    if before is not None and before.launcher == notice.launcher:
      if notice.beat < before.beat:
        return []  # It was delayed for long.
      changed = notice.beat > before.beat
    else:
      changed = asked
    other.notice = notice
    if changed:
      other.changed = now
      difference = self._difference(notice)
      if difference:
        return [GiveUpRun(difference)]
    if notice.over and not self._over:
      self._over = True
      return [RunOver(), *self._close()]
    return []

  def _difference(self, notice: Notice) -> str:
    """Names the settings that differ from another launcher's, or ""."""
    mine, theirs = dict(self._settings), dict(notice.settings)
    differ = [name for name in mine if mine[name] != theirs.get(name)]
    if not differ:
      return ""
    shown = lambda values: ", ".join(
      f"{name} {values.get(name, '(none)')}" for name in differ
    )
    return (
      "The launchers of the job have different settings:"
      f" {shown(mine)} here ({self._process}), {shown(theirs)} there"
      f" ({notice.process}). Start all of them with the same."
    )

  def _is_there(self, host: int, now: float) -> bool:
    if host == self._host:
      return True
    return now - self._others[host].changed <= self._patience.silence

  def _notice(self, host: int) -> Notice | None:
    return self.notice if host == self._host else self._others[host].notice

  # The processes on this host.

  def _ended(self, one: _Replica, given: ReplicaEnded) -> list[Effect]:
    assert one.part is not None
    if not one.runs:
      return []
    one.part = codec.replace(
      one.part,
      stage=Stage.ENDED if given.code else Stage.DONE,
      code=given.code,
      words=given.words,
      tail=given.tail,
    )
    if self._over or self._signal:
      return self._gone(one, one.part)  # Nothing is restarted.
    return []

  def _end_unwanted(self, one: _Replica) -> list[Effect]:
    if one.runs:
      return [
        *self._kill(one, "it was no longer needed"),
        *self._gone(one, one.part),
      ]
    one.wanted = None
    return self._gone(one, None)

  def _close(self) -> list[Effect]:
    """Stops all starts; running processes end by themselves."""
    effects: list[Effect] = []
    for one in self._replicas.values():
      if not (one.settled or one.runs):
        one.wanted = None
        effects += self._gone(one, None)
    return effects

  def _kill(self, one: _Replica, words: str) -> list[Effect]:
    if not one.runs:
      return []
    assert one.part is not None
    one.part = codec.replace(one.part, stage=Stage.ENDED, code=-9, words=words)
    return [KillReplica(one.place.replica)]

  def _gone(self, one: _Replica, part: Part | None) -> list[Effect]:
    """It has ended; the supervisor decides what comes next."""
    if one.plan is not None and one.plan.stage == Stage.RUNS:
      words = "" if part is None else part.words
      one.plan = codec.replace(one.plan, stage=Stage.ENDED, words=words)
    if self._over or self._signal or not self._decides(one):
      one.settled = True
    replica = one.place.replica
    if part is None:
      return [ReplicaEnded(replica, 0)]
    return [ReplicaEnded(replica, part.code, part.words, part.tail)]

  def _give_up(self, one: _Replica, words: str) -> list[Effect]:
    one.wanted, one.settled = None, True
    return [
      *self._kill(one, words),
      CannotStart(one.place.replica, words),
    ]

  # On a replica's first host.

  def _decide(self, one: _Replica, now: float) -> list[Effect]:
    if one.wanted is not None:
      return self._start(one, one.wanted, now)
    plan = one.plan
    if plan is None or plan.stage != Stage.RUNS:
      return []
    parts = []
    for host, launcher in zip(one.place.hosts, plan.launchers, strict=True):
      notice = self._notice(host)
      assert notice is not None
      part = notice.part(plan.replica, self._launcher, plan.start)
      if part is not None and part.stage == Stage.ENDED:
        return self._end(one, part)
      if notice.launcher != launcher:
        words = f"the launcher of host {host} was started anew"
      elif self._is_there(host, now) or (
        part is not None and part.stage == Stage.DONE
      ):
        parts.append(part)
        continue
      else:
        words = self._silent(host)
      lost = Part(plan.replica, self._launcher, plan.start, Stage.ENDED, 1)
      return self._end(one, codec.replace(lost, words=words))
    if all(part is not None and part.stage == Stage.DONE for part in parts):
      return self._gone(one, parts[0])
    return []

  def _start(
    self, one: _Replica, wanted: StartReplica, now: float
  ) -> list[Effect]:
    hosts = one.place.hosts
    missing = [h for h in hosts if not self._is_there(h, now)]
    if missing and now < one.until:
      return []
    one.wanted = None
    plan = Plan(wanted.replica, wanted.restarts, wanted.address, ())
    if missing:
      words = " and ".join(map(self._silent, missing))
      one.plan = codec.replace(plan, stage=Stage.ABSENT, words=words)
      return self._give_up(one, words)
    launchers = [n.launcher for n in map(self._notice, hosts) if n is not None]
    one.plan = codec.replace(plan, launchers=tuple(launchers))
    return self._begin(one, self._launcher, one.plan)

  def _end(self, one: _Replica, part: Part) -> list[Effect]:
    return [*self._kill(one, part.words), *self._gone(one, part)]

  # On its other hosts.

  def _follow(self, one: _Replica, now: float) -> list[Effect]:
    first = one.place.hosts[0]
    notice = self._others[first].notice
    if one.closing:
      if one.runs and now < one.until:
        return []
      return [*self._kill(one, "it did not end"), *self._gone(one, None)]
    there = self._is_there(first, now)
    if there:
      one.until = now + self._patience.silence
    if notice is None or not there:
      effects = self._kill(one, self._silent(first))
      if now >= one.until:
        effects += self._give_up(one, self._silent(first))
      return effects
    plan = notice.plan(one.place.replica)
    mine = one.part
    same = (
      plan is not None
      and mine is not None
      and (mine.decider, mine.start) == (notice.launcher, plan.start)
    )
    if plan is None or plan.stage == Stage.ENDED:
      return self._kill(one, "" if plan is None else plan.words)
    match plan.stage:
      case Stage.ABSENT:
        return self._give_up(one, plan.words)
      case Stage.DONE:
        one.closing = True  # The remaining processes end by themselves.
        return [] if one.runs else self._gone(one, None)
    effects = [] if same else self._kill(one, "another start of it was decided")
    if not same and self._launcher in plan.launchers and not self._signal:
      effects += self._begin(one, notice.launcher, plan)
    return effects

  # On all its hosts.

  def _begin(self, one: _Replica, decider: str, plan: Plan) -> list[Effect]:
    one.part = Part(plan.replica, decider, plan.start)
    one.signalled = False
    return [StartReplica(plan.replica, plan.start, plan.address)]

  def _pass_on(self, one: _Replica) -> list[Effect]:
    """A replica leaves as a whole when any of its hosts has to stop."""
    if not one.runs or one.signalled or self._signal:
      return []
    for host in one.place.hosts:
      notice = self._notice(host)
      if notice is not None and notice.signal and self._counts(one, notice):
        one.signalled = True
        return [SignalReplica(one.place.replica, notice.signal)]
    return []

  def _counts(self, one: _Replica, notice: Notice) -> bool:
    """Whether a launcher takes part in the current start."""
    assert one.part is not None
    part = one.part
    mine = notice.part(part.replica, part.decider, part.start)
    return mine is not None or notice.launcher == part.decider

  def _silent(self, host: int) -> str:
    if self._others[host].notice is None:
      return f"the launcher of host {host} has not come"
    return (
      f"the launcher of host {host} was silent for {self._patience.silence:g} s"
    )
