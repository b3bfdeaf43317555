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
from collections.abc import Callable
from typing import TypeAlias

from optax_dist.coordinator.extras.hosts.nodes import Share
from optax_dist.coordinator.extras.hosts.notices import Notice, Part, Stage
from optax_dist.coordinator.extras.hosts.peers import Peers
from optax_dist.coordinator.launch import supervisor
from optax_dist.coordinator.launch.supervisor import (
  CannotStart,
  Effect,
  GiveUpRun,
  KillReplica,
  LauncherStops,
  Left,
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
    >>> def made(host):
    ...   return HostSupervisor(
    ...     Share(range(1), range(host, host + 1), range(2)),
    ...     supervisor.Policy(whole=False),
    ...     Peers(host, Notice("ab"[host]), range(2), now=0.0),
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
    share: Share,
    policy: supervisor.Policy,
    peers: Peers,
    meeting_address: Callable[[], str],
  ):
    """Starts before any replica was started.

    Args:
      share: what this host has of the job.
      policy: what to do about replicas that end with an error.
      peers: what is known of the other launchers.
      meeting_address: finds an address of this host for the processes of a
        replica on several hosts.
    """
    self._own = supervisor.Supervisor(share.replicas, policy)
    # Hosts that share a replica have no other.
    self._replica, self._hosts = share.replicas[0], share.hosts
    self._others = [h for h in share.hosts if h != peers.host]
    self._part = Part()
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
      part=self._part,
      # Host 0 reads all, and is read by all: what the others have from it is not
      # passed on.
      never_joined=tuple(
        sorted(self._own.never_joined if self.peers.host else self.never_joined)
      ),
    )

  @property
  def never_joined(self) -> frozenset[int]:
    """Replicas that have ended before they ever joined, on any host."""
    found = self._own.never_joined
    for host in self.peers.hosts:
      notice = self.peers.notice(host)
      if notice is not None and host != self.peers.host:
        # One that never changed may be of an earlier launch.
        found |= set(notice.never_joined) if self.peers.came(host) else set()
    return found

  def start(self, now: float) -> list[Effect]:
    """The first effects: start all replicas."""
    return self._make_ready(self._own.start(now))

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
      case ReplicaEnded(_, code) if self._others and code:
        words = f"{given.process} on host {self.peers.host} {given.words}"
        tail = given.tail[-_LONGEST_TAIL:]
        effects += self._fail(code, words, tail, now)
      case ReplicaEnded() if self._others:
        self._set(Stage.DONE)
      case LauncherEnds(words):
        if self._part.stage in (Stage.READY, Stage.RUNS, Stage.LEAVES):
          self._set(Stage.ENDED, code=1, words=words)
        return []
      case LauncherStops(number):
        self._signal = number
        effects += self._decide(given, now)
      case _:
        effects += self._decide(given, now)
    if self._others:
      effects += self._advance(now)
    # Not before it knows which start is under way.
    known = all(map(self.peers.was_read, self._others))
    self.writes = self.writes or (known and self.peers.may_write(now))
    return effects

  def _decide(self, given: supervisor.Input, now: float) -> list[Effect]:
    """What this host's supervisor decides, as far as the others agree."""
    return self._make_ready(self._own.step(given, now))

  def _make_ready(self, decided: list[Effect]) -> list[Effect]:
    """Makes a shared replica ready where it was to be started."""
    starts = [e for e in decided if isinstance(e, StartReplica)]
    if not self._others or not starts:
      return decided
    first = self._hosts[0] == self.peers.host
    address = self._meeting_address() if first else ""
    self._set(Stage.READY, start=self._part.start + 1, address=address)
    return [e for e in decided if e not in starts]

  def _fail(self, code: int, words: str, tail: str, now: float) -> list[Effect]:
    """The replica as a whole has failed."""
    self._set(Stage.ENDED, code=code, words=words, tail=tail)
    words = f"ended, because {words}"
    return self._decide(ReplicaEnded(self._replica, code, words, tail), now)

  def _set(self, stage: str, **fields: object) -> None:
    self._part = codec.replace(self._part, stage=stage, **fields)

  def _advance(self, now: float) -> list[Effect]:
    """Does what follows from the parts of all hosts."""
    state, stage = self._own.state(self._replica), self._part.stage
    if state is State.ABSENT and stage != Stage.ABSENT:
      self._set(Stage.ABSENT, words="it was abandoned")
    if state is State.DONE and stage in (Stage.READY, Stage.RUNS, Stage.LEAVES):
      self._set(Stage.DONE)
    if state is not State.RUNNING:
      return []
    if stage in (Stage.READY, Stage.DONE) and (self.over or self._signal):
      return self._finish(now)
    return self._meet(now) if stage == Stage.READY else self._check(now)

  def _finish(self, now: float) -> list[Effect]:
    self._set(Stage.DONE)
    return self._decide(ReplicaEnded(self._replica, 0), now)

  def _meet(self, now: float) -> list[Effect]:
    """Starts the replica once all of its hosts are ready for the same start."""
    mine = self._part
    parts = {host: self._part_of(host) for host in self._hosts}
    # A start that this launcher has not been ready for goes on without it.
    known, start = mine.start if self.writes else -1, mine.start
    for host, part in parts.items():
      if part.start > known:
        begun = part.stage in _BEGUN or host == self.peers.host
        start = max(start, part.start + begun)
    self._set(Stage.READY, start=start)
    gone = [h for h in self._others if self.peers.is_gone(h, now)]
    words = " and ".join(self.peers.why_silent(h, now) for h in gone)
    for part in parts.values():
      words = part.words if part.stage == Stage.ABSENT else words
    if words:
      self._set(Stage.ABSENT, words=words)
      words += f"; {self.trouble}" if self.trouble else ""
      return self._decide(CannotStart(self._replica, words), now)
    ready = self.writes and all(
      not self.peers.is_silent(host, now)
      and parts[host].start == start
      and parts[host].stage in (Stage.READY, *_BEGUN)
      for host in self._others
    )
    if not ready:
      return []
    self._set(Stage.RUNS)
    first = self._hosts[0]
    place = mine if first == self.peers.host else parts[first]
    return [StartReplica(self._replica, start, place.address)]

  def _check(self, now: float) -> list[Effect]:
    """Ends it if it has failed on another host; else once all are done."""
    mine, done = self._part, True
    for host in self._others:
      part, code, words, tail = self._part_of(host), 1, "", ""
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
        kill = mine.stage != Stage.DONE
        killed = [KillReplica(self._replica)] if kill else []
        return [*killed, *self._fail(code, words, tail, now)]
    if mine.stage == Stage.DONE:
      return self._finish(now) if done else []
    return self._pass_on(now)

  def _pass_on(self, now: float) -> list[Effect]:
    """A replica leaves as a whole when any of its hosts has to stop."""
    for host in self._others:
      notice = self.peers.notice(host)
      if (
        notice is not None
        and notice.signal
        and notice.part.start == self._part.start
        and self._part.stage == Stage.RUNS
        and not self._signal
      ):
        self._set(Stage.LEAVES)
        leaves = self._decide(Left(self._replica), now)
        return [*leaves, SignalReplica(self._replica, notice.signal)]
    return []

  def _part_of(self, host: int) -> Part:
    """The latest part of a host, perhaps of an earlier launcher."""
    notice = self.peers.notice(host)
    return Part() if notice is None else notice.part
