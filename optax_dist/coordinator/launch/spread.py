"""Has replicas that are on several hosts start, end and start again as a whole.

The launchers of a replica's hosts agree by the notices that they write
(`notices`): the first host decides, by the same rules as about its own replicas
(`supervisor`), and starts the replica once the launchers of all its hosts are
there; the others follow. A process that dies on any host ends the replica on all of
them, and so does a host that is not heard of for too long. A pure state machine:
it takes one input and the time, and returns effects.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from typing import TypeAlias

from optax_dist.coordinator.launch.nodes import Place
from optax_dist.coordinator.launch.notices import Notice, Part, Plan, Stage


@dataclasses.dataclass(frozen=True)
class Heard:
  """Input: a host's notice was read.

  Attributes:
    host: its number.
    notice: what it says; None: it has not said anything so far.
  """

  host: int
  notice: Notice | None


@dataclasses.dataclass(frozen=True)
class StartWanted:
  """Input: a replica that this host decides about is to start.

  Attributes:
    replica: its number.
    start: how often it was started before.
    address: where its processes can meet.
  """

  replica: int
  start: int
  address: str


@dataclasses.dataclass(frozen=True)
class PartEnded:
  """Input: none of this host's processes of a replica is left.

  Attributes:
    replica: its number.
    code: 0, or that of the one that failed first, the negative for a signal.
    words: which one it was, and how it ended.
    tail: the last lines that it printed.
  """

  replica: int
  code: int
  words: str = ""
  tail: str = ""


@dataclasses.dataclass(frozen=True)
class EndWanted:
  """Input: a replica is to end, for it comes too late for the run."""

  replica: int


@dataclasses.dataclass(frozen=True)
class NoMoreStarts:
  """Input: a replica that this host decides about is not started again.

  Attributes:
    replica: its number.
    words: why it was given up; "" if it has ended well.
  """

  replica: int
  words: str = ""


@dataclasses.dataclass(frozen=True)
class RunOver:
  """Input: the run has ended, well."""


@dataclasses.dataclass(frozen=True)
class HostStops:
  """Input: this host is to end; its own processes have got the signal."""

  number: int


@dataclasses.dataclass(frozen=True)
class Tick:
  """Input: time has passed."""


Input: TypeAlias = (
  Heard
  | StartWanted
  | PartEnded
  | EndWanted
  | NoMoreStarts
  | RunOver
  | HostStops
  | Tick
)


@dataclasses.dataclass(frozen=True)
class StartPart:
  """Effect: start this host's processes of a replica; a `PartEnded` follows.

  Attributes:
    replica: its number.
    start: how often it was started before.
    address: where its processes meet.
  """

  replica: int
  start: int
  address: str


@dataclasses.dataclass(frozen=True)
class KillPart:
  """Effect: end this host's processes of a replica; no `PartEnded` follows."""

  replica: int


@dataclasses.dataclass(frozen=True)
class SignalPart:
  """Effect: pass a signal on to this host's processes of a replica."""

  replica: int
  number: int


@dataclasses.dataclass(frozen=True)
class ReplicaEnded:
  """Effect: a replica has ended on all hosts, or is about to.

  Attributes:
    replica: its number.
    start: how often it was started before.
    code: 0, or that of the process that failed first.
    words: which one it was, and how it ended.
    tail: the last lines that it printed.
  """

  replica: int
  start: int
  code: int = 0
  words: str = ""
  tail: str = ""


@dataclasses.dataclass(frozen=True)
class CannotStart:
  """Effect: a replica is not started again.

  Attributes:
    replica: its number.
    words: why.
  """

  replica: int
  words: str


@dataclasses.dataclass(frozen=True)
class RunOverElsewhere:
  """Effect: another host says that the run is over."""


@dataclasses.dataclass(frozen=True)
class Clash:
  """Effect: another launcher has this one's place.

  Attributes:
    words: which one, for people.
  """

  words: str


Effect: TypeAlias = (
  StartPart
  | KillPart
  | SignalPart
  | ReplicaEnded
  | CannotStart
  | RunOverElsewhere
  | Clash
)


@dataclasses.dataclass(frozen=True)
class Patience:
  """How long hosts wait for each other, in seconds.

  Attributes:
    meet: until all hosts of a replica are there, at first.
    silence: for which a host may not be heard of; as long is waited for it to
      come back.
  """

  meet: float = 300.0
  silence: float = 60.0

  def __post_init__(self) -> None:
    for field in dataclasses.fields(self):
      value = getattr(self, field.name)
      if not 0 < value < math.inf:
        raise ValueError(f"{field.name} must be above 0, got {value}.")


@dataclasses.dataclass
class _Host:
  """Another host, as it was heard of last."""

  notice: Notice | None = None
  asked: bool = False
  # When its notice last changed: what lies there unchanged may be of old.
  changed: float = -math.inf


@dataclasses.dataclass
class _Replica:
  place: Place
  wanted: StartWanted | None = None
  until: float = 0.0  # When `wanted`, or its first host, must be there.
  plan: Plan | None = None  # If this host decides.
  part: Part | None = None
  settled: bool = False
  signalled: bool = False
  closing: bool = False  # Done elsewhere.

  @property
  def runs(self) -> bool:
    """Whether there are processes of it on this host."""
    return self.part is not None and self.part.stage == Stage.RUNS


class Spread:
  """The state machine; see the module.

  Example:
    >>> places = [Place(0, range(1), range(2))]
    >>> first = Spread(0, "a", places, Patience(), now=0.0)
    >>> first.step(StartWanted(0, 0, "10.0.0.1:29500"), 0.0)
    []
    >>> first.step(Heard(1, None), 1.0)
    []
    >>> first.step(Heard(1, Notice("b")), 2.0)
    [StartPart(replica=0, start=0, address='10.0.0.1:29500')]
    >>> second = Spread(1, "b", [Place(0, range(1, 2), range(2))], Patience(), 0.0)
    >>> second.step(Heard(0, None), 2.0)
    []
    >>> second.step(Heard(0, first.notice), 2.2)
    [StartPart(replica=0, start=0, address='10.0.0.1:29500')]
    >>> second.step(PartEnded(0, -9, "process 1 was ended by SIGKILL"), 9.0)
    []
    >>> first.step(Heard(1, second.notice), 9.2)[0]
    KillPart(replica=0)
  """

  def __init__(
    self,
    host: int,
    launcher: str,
    places: Iterable[Place],
    patience: Patience,
    now: float,
  ):
    """Knows nothing of other hosts so far.

    Args:
      host: this one.
      launcher: a name of this launcher, of which there is no second one.
      places: of the replicas that this host shares with others.
      patience: how long hosts wait for each other.
      now: the time.
    """
    self._host, self._launcher, self._patience = host, launcher, patience
    self._replicas = {
      p.replica: _Replica(p, until=now + patience.meet) for p in places
    }
    self._others = {
      h: _Host()
      for one in self._replicas.values()
      for h in one.place.hosts
      if h != host
    }
    self._written = self._over = False
    self._signal = 0

  @property
  def hosts(self) -> list[int]:
    """Whose notices it wants to be told, its own included."""
    return sorted([self._host, *self._others])

  @property
  def notice(self) -> Notice:
    """What the others are to read; its beat is for who writes it."""
    every = self._replicas.values()
    return Notice(
      self._launcher,
      over=self._over,
      signal=self._signal,
      plans=tuple(r.plan for r in every if r.plan is not None),
      parts=tuple(r.part for r in every if r.part is not None),
    )

  def step(self, given: Input, now: float) -> list[Effect]:
    """Takes an input, and says what is to be done."""
    effects: list[Effect] = []
    match given:
      case Heard(host, notice) if host == self._host:
        effects += self._read_own(notice)
      case Heard(host, notice):
        effects += self._hear(self._others[host], notice, now)
      case StartWanted(replica, start):
        one = self._replicas[replica]
        wait = self._patience.silence if start else self._patience.meet
        one.wanted, one.until = given, now + wait
      case PartEnded(replica):
        effects += self._ended(self._replicas[replica], given)
      case EndWanted(replica):
        effects += self._end_unwanted(self._replicas[replica])
      case NoMoreStarts(replica, words):
        one = self._replicas[replica]
        one.wanted, one.settled = None, True
        plan = one.plan or Plan(replica, 0, "", ())
        stage = Stage.ABSENT if words else Stage.DONE
        one.plan = dataclasses.replace(plan, stage=stage, words=words)
      case RunOver():
        self._over = True
        effects += self._close()
      case HostStops(number):
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

  def decides(self, replica: int) -> bool:
    """Whether this host is the first one of a replica."""
    return self._decides(self._replicas[replica])

  def _decides(self, one: _Replica) -> bool:
    return one.place.hosts[0] == self._host

  def _read_own(self, notice: Notice | None) -> list[Effect]:
    if notice is None:
      return []
    mine = notice.launcher == self._launcher
    if self._written and not mine:
      return [
        Clash(
          f"Another launcher says that it is on host {self._host}, too: each"
          " host has a --node-rank of its own, and one launcher."
        )
      ]
    # An earlier launcher of this host may have left one.
    self._written = self._written or mine
    return []

  def _hear(
    self, other: _Host, notice: Notice | None, now: float
  ) -> list[Effect]:
    before, asked = other.notice, other.asked
    other.asked = True
    if notice is None:
      return []
    if before is not None and before.launcher == notice.launcher:
      if notice.beat < before.beat:
        return []  # It was on its way for long.
      changed = notice.beat > before.beat
    else:
      changed = asked
    other.notice = notice
    if changed:
      other.changed = now
    if notice.over and not self._over:
      self._over = True
      return [RunOverElsewhere(), *self._close()]
    return []

  def _is_there(self, host: int, now: float) -> bool:
    if host == self._host:
      return True
    return now - self._others[host].changed <= self._patience.silence

  def _notice(self, host: int) -> Notice | None:
    return self.notice if host == self._host else self._others[host].notice

  # What the processes here do.

  def _ended(self, one: _Replica, given: PartEnded) -> list[Effect]:
    assert one.part is not None
    if not one.runs:
      return []
    one.part = dataclasses.replace(
      one.part,
      stage=Stage.ENDED if given.code else Stage.DONE,
      code=given.code,
      words=given.words,
      tail=given.tail,
    )
    if self._over or self._signal:
      return self._gone(one, one.part)  # Nobody is started again.
    return []

  def _end_unwanted(self, one: _Replica) -> list[Effect]:
    if one.runs:
      return [*self._kill(one, "it came too late"), *self._gone(one, one.part)]
    one.wanted = None
    return self._gone(one, None)

  def _close(self) -> list[Effect]:
    """Nobody starts any more; what runs ends by itself."""
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
    one.part = dataclasses.replace(
      one.part, stage=Stage.ENDED, code=-9, words=words
    )
    return [KillPart(one.place.replica)]

  def _gone(self, one: _Replica, part: Part | None) -> list[Effect]:
    """It has ended; what comes after is up to the supervisor."""
    if one.plan is not None and one.plan.stage == Stage.RUNS:
      words = "" if part is None else part.words
      one.plan = dataclasses.replace(one.plan, stage=Stage.ENDED, words=words)
    if self._over or self._signal or not self._decides(one):
      one.settled = True
    replica = one.place.replica
    if part is None:
      return [ReplicaEnded(replica, 0)]
    return [ReplicaEnded(replica, part.start, part.code, part.words, part.tail)]

  def _give_up(self, one: _Replica, words: str) -> list[Effect]:
    one.wanted, one.settled = None, True
    return [
      *self._kill(one, words),
      CannotStart(one.place.replica, words),
    ]

  # On the first host of a replica.

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
      return self._end(one, dataclasses.replace(lost, words=words))
    if all(part is not None and part.stage == Stage.DONE for part in parts):
      return self._gone(one, parts[0])
    return []

  def _start(
    self, one: _Replica, wanted: StartWanted, now: float
  ) -> list[Effect]:
    hosts = one.place.hosts
    missing = [h for h in hosts if not self._is_there(h, now)]
    if missing and now < one.until:
      return []
    one.wanted = None
    plan = Plan(wanted.replica, wanted.start, wanted.address, ())
    if missing:
      words = " and ".join(map(self._silent, missing))
      one.plan = dataclasses.replace(plan, stage=Stage.ABSENT, words=words)
      return self._give_up(one, words)
    launchers = [n.launcher for n in map(self._notice, hosts) if n is not None]
    one.plan = dataclasses.replace(plan, launchers=tuple(launchers))
    return self._begin(one, self._launcher, one.plan)

  def _end(self, one: _Replica, part: Part) -> list[Effect]:
    return [*self._kill(one, part.words), *self._gone(one, part)]

  # On the others.

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
        one.closing = True  # What is left of it ends by itself.
        return [] if one.runs else self._gone(one, None)
    effects = [] if same else self._kill(one, "another start of it was decided")
    if not same and self._launcher in plan.launchers and not self._signal:
      effects += self._begin(one, notice.launcher, plan)
    return effects

  # On all of them.

  def _begin(self, one: _Replica, decider: str, plan: Plan) -> list[Effect]:
    one.part = Part(plan.replica, decider, plan.start)
    one.signalled = False
    return [StartPart(plan.replica, plan.start, plan.address)]

  def _pass_on(self, one: _Replica) -> list[Effect]:
    """A replica leaves as a whole when any of its hosts is to end."""
    if not one.runs or one.signalled or self._signal:
      return []
    for host in one.place.hosts:
      notice = self._notice(host)
      if notice is not None and notice.signal and self._counts(one, notice):
        one.signalled = True
        return [SignalPart(one.place.replica, notice.signal)]
    return []

  def _counts(self, one: _Replica, notice: Notice) -> bool:
    """Whether a launcher takes part in the start that is on."""
    assert one.part is not None
    part = one.part
    mine = notice.part(part.replica, part.decider, part.start)
    return mine is not None or notice.launcher == part.decider

  def _silent(self, host: int) -> str:
    if self._others[host].notice is None:
      return f"the launcher of host {host} has not come"
    return (
      f"the launcher of host {host} was not heard of for"
      f" {self._patience.silence:g} s"
    )
