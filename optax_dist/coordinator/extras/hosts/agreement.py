"""Compares hosts' settings; starts replicas on several hosts as a whole.

Launchers of one job that were started with different settings end, and so does
one that runs as a host that has a launcher already. A replica on several hosts
is in every launcher's own hands, by the same rules as on one host
(`supervisor`), but for two things: it starts once the launchers of all its
hosts are ready for the same start, and it ends on all of them when it has
failed on one, or when a launcher is silent for too long or was started anew.
They know that from each other's notices (`notices`).

    ready -> runs -> done, on all hosts: the replica has ended
      ^       |
      |       v
      +---- ended: so it has on all other hosts

A pure state machine: it takes one input and the time, and returns effects.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import NamedTuple, TypeAlias

from optax_dist.coordinator.extras.hosts.nodes import Place
from optax_dist.coordinator.extras.hosts.notices import Notice, Part, Stage
from optax_dist.coordinator.launch.supervisor import (
  CannotStart,
  GiveUpRun,
  KillReplica,
  LauncherStops,
  ReplicaEnded,
  RunOver,
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


# A `StartReplica` asks for a start, at this host's address; a `ReplicaEnded` is
# about this host's processes only; a `CannotStart` abandons the replica.
Input: TypeAlias = (
  Heard
  | LauncherEnds
  | StartReplica
  | ReplicaEnded
  | KillReplica
  | CannotStart
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
_LONGEST_TAIL = 4096  # Characters sent to other hosts.


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
  hosts: list[int]  # The others.
  first: int
  part: Part
  until: float = 0.0  # How long it waits for the other hosts to be ready.
  signalled: bool = False
  settled: bool = False  # Nothing more follows from what its hosts say.


class Agreement:
  """The state machine; see the module docstring.

  Attributes:
    writes: whether this launcher may write its notice: not before it knows that
      no other launcher writes under the same key.

  Example:
    >>> places = lambda host: [Place(0, range(host, host + 1), range(2))]
    >>> first = Agreement(0, "a", places(0), Patience(), now=0.0)
    >>> second = Agreement(1, "b", places(1), Patience(), now=0.0)
    >>> first.step(Heard(1, None), 0.0) + second.step(Heard(0, None), 0.0)
    []
    >>> first.step(StartReplica(0, 0, "10.0.0.1:29500"), 0.0)
    []
    >>> second.step(StartReplica(0, 0), 1.0)
    []
    >>> second.step(Heard(0, first.notice), 2.0)
    [StartReplica(replica=0, restarts=0, address='10.0.0.1:29500')]
    >>> first.step(Heard(1, second.notice), 2.2)
    [StartReplica(replica=0, restarts=0, address='10.0.0.1:29500')]
    >>> [gone] = second.step(ReplicaEnded(0, -9, "died", process="process 1"), 9.0)
    >>> gone.words
    'ended, because process 1 on host 1 died'
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
      p.replica: _Replica(
        [h for h in p.hosts if h != host], p.hosts[0], Part(p.replica)
      )
      for p in places
    }
    shared = [h for one in self._replicas.values() for h in one.hosts]
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
    return Notice(
      self._launcher,
      over=self._over,
      signal=self._signal,
      parts=tuple(one.part for one in self._replicas.values()),
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
      case StartReplica(replica, restarts, address):
        one = self._replicas[replica]
        wait = self._patience.silence if restarts else self._patience.meet
        one.until, one.signalled = now + wait, False
        self._set(one, Stage.READY, start=one.part.start + 1, address=address)
      case ReplicaEnded(replica):
        effects += self._ended(self._replicas[replica], given)
      case KillReplica(replica):
        self._settle(self._replicas[replica])
      case CannotStart(replica, words):
        self._set(self._replicas[replica], Stage.ABSENT, words=words)
      case LauncherEnds(words):
        for one in self._replicas.values():
          if one.part.stage in (Stage.READY, Stage.RUNS):
            self._set(one, Stage.ENDED, code=1, words=words)
        return []
      case RunOver():
        self._over = True
        effects += self._close()
      case LauncherStops(number):
        self._signal = number
        effects += self._close()
    for one in self._replicas.values():
      effects += self._advance(one, now)
    return effects

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

  def _set(self, one: _Replica, stage: str, **fields: object) -> None:
    one.part = codec.replace(one.part, stage=stage, **fields)

  def _advance(self, one: _Replica, now: float) -> list[Effect]:
    match one.part.stage:
      case Stage.READY:
        return self._meet(one, now)
      case Stage.RUNS:
        return self._check(one, now) or self._pass_on(one)
      case Stage.DONE if not one.settled:
        return self._check(one, now)
    return []

  def _meet(self, one: _Replica, now: float) -> list[Effect]:
    """Starts the replica once all of its hosts are ready for the same start."""
    mine, all_ready = one.part, True
    address = mine.address if one.first == self._host else ""
    missing = [h for h in one.hosts if not self._is_there(h, now)]
    for host in set(one.hosts).difference(missing):
      part = self._part(host, mine.replica)
      if part.stage == Stage.ABSENT:
        return self._give_up(one, part.words)
      if part.start > mine.start:
        # It counts from before this launcher was started anew.
        self._set(one, Stage.READY, start=part.start)
        return self._meet(one, now)
      all_ready &= part.start == mine.start and (
        part.stage == Stage.READY or self._launcher in part.launchers
      )
      address = part.address if host == one.first else address
    if all_ready and not missing:
      launchers = tuple(self._notice(host).launcher for host in one.hosts)
      self._set(one, Stage.RUNS, launchers=launchers)
      return [StartReplica(mine.replica, mine.start, address)]
    # Those that are there may have to notice a failure first, and to pause.
    if now < one.until + (0.0 if missing else self._patience.meet):
      return []
    words = " and ".join(map(self._silent, missing))
    return self._give_up(one, words or "its other hosts were not ready")

  def _give_up(self, one: _Replica, words: str) -> list[Effect]:
    self._set(one, Stage.ABSENT, words=words)
    return [CannotStart(one.part.replica, words)]

  def _check(self, one: _Replica, now: float) -> list[Effect]:
    """Ends it if it has failed on another host; else once all are done."""
    mine, done = one.part, one.part.stage == Stage.DONE
    for host, launcher in zip(one.hosts, mine.launchers, strict=True):
      part = self._part(host, mine.replica)
      code, tail = 1, ""
      if self._notice(host).launcher != launcher:
        words = f"the launcher of host {host} was started anew"
      elif part.start == mine.start and part.stage == Stage.DONE:
        continue
      elif part.start > mine.start or part.stage in (Stage.ENDED, Stage.ABSENT):
        code, words, tail = part.code or 1, part.words, part.tail
      elif not self._is_there(host, now):
        words = self._silent(host)
      else:
        done = False
        continue
      self._set(one, Stage.ENDED, code=code, words=words, tail=tail)
      kill = [] if mine.stage == Stage.DONE else [KillReplica(mine.replica)]
      return [*kill, self._failed(one.part)]
    return self._settle(one) if done else []

  def _settle(self, one: _Replica) -> list[Effect]:
    one.settled = True
    self._set(one, Stage.DONE)
    return [ReplicaEnded(one.part.replica, 0)]

  def _failed(self, part: Part) -> ReplicaEnded:
    words = f"ended, because {part.words}"
    return ReplicaEnded(part.replica, part.code, words, part.tail)

  def _ended(self, one: _Replica, given: ReplicaEnded) -> list[Effect]:
    """Those of this host have ended."""
    if given.code:
      words = f"{given.process} on host {self._host} {given.words}"
      tail = given.tail[-_LONGEST_TAIL:]
      self._set(one, Stage.ENDED, code=given.code, words=words, tail=tail)
      return [self._failed(one.part)]
    self._set(one, Stage.DONE)
    return self._settle(one) if self._over or self._signal else []

  def _close(self) -> list[Effect]:
    """Stops all starts; running processes end by themselves."""
    effects: list[Effect] = []
    for one in self._replicas.values():
      if one.part.stage in (Stage.READY, Stage.DONE) and not one.settled:
        effects += self._settle(one)
    return effects

  def _pass_on(self, one: _Replica) -> list[Effect]:
    """A replica leaves as a whole when any of its hosts has to stop."""
    for host, launcher in zip(one.hosts, one.part.launchers, strict=True):
      notice = self._notice(host)
      if (
        notice.signal
        and notice.launcher == launcher
        and not (one.signalled or self._signal)
      ):
        one.signalled = True
        return [SignalReplica(one.part.replica, notice.signal)]
    return []

  def _notice(self, host: int) -> Notice:
    notice = self._others[host].notice
    assert notice is not None
    return notice

  def _part(self, host: int, replica: int) -> Part:
    parts = self._notice(host).parts
    return next((p for p in parts if p.replica == replica), Part(replica))

  def _silent(self, host: int) -> str:
    if self._others[host].notice is None:
      return f"the launcher of host {host} has not come"
    return (
      f"the launcher of host {host} was silent for {self._patience.silence:g} s"
    )
