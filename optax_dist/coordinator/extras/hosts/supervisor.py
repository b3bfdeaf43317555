"""Decides about a host's replicas, together with the job's other hosts.

Each launcher decides about its replicas by the same rules as on one host
(`launch.supervisor`), but a replica on several hosts starts once the launchers
of all its hosts are ready for the same start, and ends on all of them when it
has failed on one, or when a launcher is silent for too long or was started
anew. Each of them writes what its part of the replica does, and decides from
what the others have written:

    ready -> runs -> done, on all hosts: the replica has ended
      ^       |
      |       v
      +---- ended: so it has on all other hosts

Starts are numbered, and their number never falls. A launcher that was started
anew begins with a higher one than any that runs, so whoever sees the higher
number knows that its own start is over.

A pure state machine: it takes one input and the time, and returns effects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import TypeAlias

from optax_dist.coordinator.extras.hosts.nodes import Place
from optax_dist.coordinator.extras.hosts.notices import Notice, Part, Stage
from optax_dist.coordinator.extras.hosts.peers import Peers
from optax_dist.coordinator.launch import supervisor
from optax_dist.coordinator.launch.supervisor import (
  CannotStart,
  Effect,
  GiveUpRun,
  KillReplica,
  LauncherStops,
  ReplicaEnded,
  RunOver,
  SignalReplica,
  StartReplica,
  State,
)
from optax_dist.coordinator.protocol import codec


@dataclasses.dataclass(frozen=True)
class NoticeRead:
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


# A `ReplicaEnded` is about this host's processes only.
Input: TypeAlias = supervisor.Input | NoticeRead | LauncherEnds

_BEGUN = (Stage.RUNS, Stage.LEAVES, Stage.DONE)
_LONGEST_TAIL = 4096  # Characters sent to other hosts.


class HostSupervisor:
  """The state machine; see the module docstring.

  Attributes:
    peers: what is known of the other launchers.
    writes: whether this launcher may write its notice.
    trouble: why other hosts can't be read; "" while they can.

  Example:
    >>> from optax_dist.coordinator.extras.hosts.peers import Patience
    >>> def made(host):
    ...   return HostSupervisor(
    ...     [Place(0, range(host, host + 1), range(2))],
    ...     supervisor.Policy(whole=False),
    ...     Peers(host, Notice("ab"[host]), range(2), Patience(), now=0.0),
    ...     lambda: "10.0.0.1:29500")
    >>> first, second = made(0), made(1)
    >>> for one in (first, second):  # No launcher has written anything.
    ...   assert one.start(0.0) == []
    ...   assert one.step(NoticeRead(0, None), 0.0) == []
    ...   assert one.step(NoticeRead(1, None), 0.0) == []
    >>> second.step(NoticeRead(0, first.notice), 2.0)
    [StartReplica(replica=0, restarts=0, address='10.0.0.1:29500')]
    >>> first.step(NoticeRead(1, second.notice), 2.2)
    [StartReplica(replica=0, restarts=0, address='10.0.0.1:29500')]
    >>> _ = second.step(ReplicaEnded(0, -9, "died", process="process 1"), 9.0)
    >>> first.step(NoticeRead(1, second.notice), 9.2)[0]
    KillReplica(replica=0)
  """

  def __init__(
    self,
    places: Iterable[Place],
    policy: supervisor.Policy,
    peers: Peers,
    meeting_address: Callable[[], str],
  ):
    """Starts before any replica was started.

    Args:
      places: the replicas that this host has processes of.
      policy: what to do about those that end with an error.
      peers: what is known of the other launchers.
      meeting_address: finds an address of this host for the processes of a
        replica on several hosts.
    """
    places = list(places)
    self._own = supervisor.Supervisor([p.replica for p in places], policy)
    # The hosts of each replica on several of them, and this host's part.
    self._hosts = {p.replica: p.hosts for p in places if len(p.hosts) > 1}
    self._parts = {replica: Part(replica) for replica in self._hosts}
    self._meeting_address = meeting_address
    self._signal = 0
    self.peers, self.writes, self.trouble = peers, False, ""

  @property
  def over(self) -> bool:
    """Whether the run has finished."""
    return self._own.over

  @property
  def notice(self) -> Notice:
    """The notice for the others; the writer adds the beat."""
    return codec.replace(
      self.peers.own,
      over=self.over,
      signal=self._signal,
      parts=tuple(self._parts.values()),
    )

  def start(self, now: float) -> list[Effect]:
    """The first effects: start all replicas."""
    return self._share(self._own.start(now))

  def step(self, given: Input, now: float) -> list[Effect]:
    """Processes an input; returns the effects."""
    effects: list[Effect] = []
    match given:
      case NoticeRead(host, notice):
        wrong = self.peers.update(host, notice, now)
        if wrong:
          return [GiveUpRun(wrong)]
        if notice is not None and notice.over:
          effects += self._decide(RunOver(), now)
      case ReplicaEnded(replica, code) if replica in self._parts:
        effects += self._ended(given, now) if code else []
        if not code:
          self._set(replica, Stage.DONE)
      case LauncherEnds(words):
        for replica, part in self._parts.items():
          if part.stage in (Stage.READY, Stage.RUNS, Stage.LEAVES):
            self._set(replica, Stage.ENDED, code=1, words=words)
        return []
      case LauncherStops(number):
        self._signal = number
        effects += self._decide(given, now)
      case _:
        effects += self._decide(given, now)
    for replica in self._parts:
      effects += self._advance(replica, now)
    # Not before it knows which starts are under way.
    shared = {h for replica in self._parts for h in self._hosts[replica]}
    known = all(map(self.peers.was_read, shared))
    self.writes = self.writes or (known and self.peers.may_write(now))
    return effects

  def _decide(self, given: supervisor.Input, now: float) -> list[Effect]:
    """What this host's supervisor decides, as far as the others agree."""
    return self._share(self._own.step(given, now))

  def _share(self, decided: Iterable[Effect]) -> list[Effect]:
    """Makes a replica on several hosts ready where it was to be started."""
    effects: list[Effect] = []
    for effect in decided:
      match effect:
        case StartReplica(replica) if replica in self._parts:
          first = self._hosts[replica][0] == self.peers.host
          address = self._meeting_address() if first else ""
          start = self._parts[replica].start + 1
          self._set(replica, Stage.READY, start=start, address=address)
        case _:
          effects.append(effect)
    return effects

  def _ended(self, given: ReplicaEnded, now: float) -> list[Effect]:
    """The processes of this host have failed."""
    words = f"{given.process} on host {self.peers.host} {given.words}"
    tail = given.tail[-_LONGEST_TAIL:]
    return self._fail(given.replica, given.code, words, tail, now)

  def _fail(
    self, replica: int, code: int, words: str, tail: str, now: float
  ) -> list[Effect]:
    """The replica as a whole has failed."""
    self._set(replica, Stage.ENDED, code=code, words=words, tail=tail)
    words = f"ended, because {words}"
    return self._decide(ReplicaEnded(replica, code, words, tail), now)

  def _set(self, replica: int, stage: str, **fields: object) -> None:
    part = self._parts[replica]
    self._parts[replica] = codec.replace(part, stage=stage, **fields)

  def _advance(self, replica: int, now: float) -> list[Effect]:
    """Does what follows from the parts of all hosts."""
    state, stage = self._own.state(replica), self._parts[replica].stage
    if state is State.ABSENT and stage != Stage.ABSENT:
      self._set(replica, Stage.ABSENT, words="it was abandoned")
    if state is State.DONE and stage in (Stage.READY, Stage.RUNS, Stage.LEAVES):
      self._set(replica, Stage.DONE)
    if state is not State.RUNNING:
      return []
    if stage in (Stage.READY, Stage.DONE) and (self.over or self._signal):
      return self._finish(replica, now)
    if stage == Stage.READY:
      return self._meet(replica, now)
    return self._check(replica, now)

  def _finish(self, replica: int, now: float) -> list[Effect]:
    self._set(replica, Stage.DONE)
    return self._decide(ReplicaEnded(replica, 0), now)

  def _meet(self, replica: int, now: float) -> list[Effect]:
    """Starts the replica once all of its hosts are ready for the same start."""
    hosts, mine = self._hosts[replica], self._parts[replica]
    parts = {host: self._part(host, replica) for host in hosts}
    # A start that this launcher has not been ready for goes on without it.
    known, start = mine.start if self.writes else -1, mine.start
    for host, part in parts.items():
      if part.start > known:
        begun = part.stage in _BEGUN or host == self.peers.host
        start = max(start, part.start + begun)
    self._set(replica, Stage.READY, start=start)
    gone = [h for h in self._others(replica) if self.peers.is_gone(h, now)]
    words = " and ".join(self.peers.why_silent(h, now) for h in gone)
    for part in parts.values():
      words = part.words if part.stage == Stage.ABSENT else words
    if words:
      self._set(replica, Stage.ABSENT, words=words)
      words += f"; {self.trouble}" if self.trouble else ""
      return self._decide(CannotStart(replica, words), now)
    ready = self.writes and all(
      not self.peers.is_silent(host, now)
      and parts[host].start == start
      and parts[host].stage in (Stage.READY, *_BEGUN)
      for host in self._others(replica)
    )
    if not ready:
      return []
    self._set(replica, Stage.RUNS)
    first = mine if hosts[0] == self.peers.host else parts[hosts[0]]
    return [StartReplica(replica, start, first.address)]

  def _check(self, replica: int, now: float) -> list[Effect]:
    """Ends it if it has failed on another host; else once all are done."""
    mine, done = self._parts[replica], True
    for host in self._others(replica):
      part, code, words, tail = self._part(host, replica), 1, "", ""
      ended = part.stage in (Stage.ENDED, Stage.ABSENT)
      if part.start > mine.start or (part.start == mine.start and ended):
        code, tail = part.code or 1, part.tail
        words = part.words or f"the launcher of host {host} was started anew"
      elif part.start == mine.start and part.stage == Stage.DONE:
        continue
      elif self.peers.is_silent(host, now):
        words = self.peers.why_silent(host, now)
      done = False
      if words:
        kill = [] if mine.stage == Stage.DONE else [KillReplica(replica)]
        return [*kill, *self._fail(replica, code, words, tail, now)]
    if mine.stage == Stage.DONE:
      return self._finish(replica, now) if done else []
    return self._pass_on(replica)

  def _pass_on(self, replica: int) -> list[Effect]:
    """A replica leaves as a whole when any of its hosts has to stop."""
    mine = self._parts[replica]
    for host in self._others(replica):
      notice = self.peers.notice(host)
      if (
        notice is not None
        and notice.signal
        and self._part(host, replica).start == mine.start
        and mine.stage == Stage.RUNS
        and not self._signal
      ):
        self._set(replica, Stage.LEAVES)
        return [SignalReplica(replica, notice.signal)]
    return []

  def _others(self, replica: int) -> list[int]:
    return [h for h in self._hosts[replica] if h != self.peers.host]

  def _part(self, host: int, replica: int) -> Part:
    """The latest part of a host, perhaps of an earlier launcher."""
    notice = self.peers.notice(host)
    parts = () if notice is None else notice.parts
    return next((p for p in parts if p.replica == replica), Part(replica))
