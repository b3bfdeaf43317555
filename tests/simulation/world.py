"""A world for the protocol: virtual time, processes, network, a log, training.

The cores that run here are those that run in earnest (`Coordinator`, `Client`). What
is replaced is all around them: clocks (of different speeds), connections (ordered,
and broken, cut or stopped), the log (which outlives its coordinator, unless its host
loses power), the exchange of gradients, snapshots, and the training loops. Parameters
are numbers: a version is the hash of the version before and the mean that was
applied, so equal versions stand for equal bits. A training loop is what calls
`Submission`, as `Replica` does: it computes, steps, abandons, is interrupted,
leaves.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import heapq
import json
import math
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from optax_dist import ledger
from optax_dist.coordinator.protocol import codec, deadlines, liveness
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.client.client import Client
from optax_dist.coordinator.protocol.config import Config, Me
from optax_dist.coordinator.protocol.coordinator.coordinator import Coordinator
from optax_dist.coordinator.protocol.entries import (
  RECORDS,
  Job,
  Record,
  RoundId,
  Rules,
  Start,
)
from optax_dist.coordinator.protocol.history import History
from optax_dist.coordinator.protocol.policies import audit
from optax_dist.coordinator.runtime.inbox import Joined
from optax_dist.coordinator.training.submission import Submission
from optax_dist.ledger import tree
from tests.simulation import sums

_MASK = (1 << 63) - 1


def digest(*parts: Any) -> int:
  """A number for these numbers; the same in every process."""
  return hash(parts) & _MASK


@dataclasses.dataclass(frozen=True)
class Setting:
  """The setting of a run; its faults are in `faults`.

  Attributes:
    replicas: how many there are.
    needed: gradients in a step.
    inline: whether gradients are sent inline.
    alone: whether replicas take part one at a time.
    max_staleness: steps by which a gradient may be late.
    lower_on_leave: as in `Config`.
    lower_on_loss: as in `Config`.
    steps: the run is to end after so many.
    latency: seconds that a message takes, about.
    compute: seconds that a gradient takes, about, for each replica.
    rates: the speed of each replica's clock.
    fingerprint_every: as in `Config`.
    same_start: whether all start from the same state.
    starts: the step of the state that each replica brings; (): 0 for all.
    leaves: whether each replica leaves after its last step; otherwise the first
      one there finishes the run for all.
    data: whose samples are leased, if any.
    adaptive: whether deadlines follow what is seen; there are heartbeats then.
    policy: as in `Config`.
    local_steps: own steps from one submission to the next.
    coded: whether messages and the log travel as bytes.
    not_finite: how often a gradient is not finite.
    bad: replicas that are bad, and how: see `bad.WAYS`.
    max_skipped: as in `Rules`.
    strangers: replicas that have another job from the start.
    compiling: seconds that a process's first gradient takes beside.
  """

  replicas: int = 3
  needed: int = 2
  inline: bool = True
  alone: bool = False
  max_staleness: int = 0
  lower_on_leave: bool = True
  lower_on_loss: bool = False
  steps: int = 12
  latency: float = 0.001
  compute: tuple[float, ...] = (0.05,) * 8
  rates: tuple[float, ...] = (1.0,) * 8
  fingerprint_every: int = 0
  same_start: bool = True
  starts: tuple[int, ...] = ()
  leaves: bool = False
  data: ledger.Batches | None = None
  adaptive: bool = False
  policy: Any = None
  local_steps: int = 1
  coded: bool = False
  not_finite: float = 0.01
  bad: tuple[tuple[int, str], ...] = ()
  max_skipped: int | None = None
  strangers: tuple[int, ...] = ()
  compiling: float = 0.0

  @property
  def window(self) -> int:
    """Samples of a step that is always the same slots; 0: it is not."""
    data = self.data
    return 0 if data is None or not data.deterministic else data.global_batch

  @property
  def shared(self) -> bool:
    """Whether a step has more gradients than replicas: all are needed."""
    return not self.window and self.needed > self.replicas

  @property
  def least(self) -> int:
    """Replicas that a step needs: any one can compute all slots."""
    return 1 if self.window else self.needed


TIMEOUT, TRANSFER_TIMEOUT, SILENCE_TIMEOUT = 100.0, 10.0, 5.0
SILENCE, CONNECT = 5.0, 10.0
HEARTBEAT = 1.0
# The fastest clock.
FASTEST = 1.1
# Seconds until a fingerprint is taken, about.
FINGERPRINT = 0.5
MOST_EVENTS = 300_000
# The name of the coordinator's process.
COORDINATOR = "coordinator"
# How often a gradient is not finite that is so at times.
AT_TIMES = 0.4
# What else becomes of a gradient, and how often.
MISHAPS = (
  ("is abandoned", 0.02),
  ("is interrupted before it submits", 0.01),
  ("is interrupted while it waits", 0.01),
)


# Of `World`, by the kind of effect that each carries out.
_METHODS: dict[type, str] = {}
# What may come twice, for which a coordinator must not do anything.
_SAID = (msg.SubmitGradient, msg.Done, msg.Failed)
# Losses after which an end closes the connection, which the other one may still
# have: a connection that was opened later may have arrived earlier.
_CLOSES = ("silent", "unreachable", "replaced")


class Published(NamedTuple):
  """A state: its step, and its version."""

  step: int
  version: int


class Connection:
  """Two processes, and what each knows of the other.

  Attributes:
    ends: the two.
    open: whether each end still has it.
    last: when the latest delivery to each end is due.
    ready: when the two kernels have agreed on it.
  """

  __slots__ = ("ends", "last", "open", "ready")

  def __init__(self, a: Process, b: Process, now: float):
    self.ends = (a, b)
    self.open = {a.name: True, b.name: True}
    self.last = {a.name: now, b.name: now}
    self.ready = now

  def other(self, process: Process) -> Process:
    a, b = self.ends
    return b if process is a else a


class Aggregation:
  """One process's side of an exchange of gradients."""

  __slots__ = (
    "ended",
    "gradients",
    "me",
    "means",
    "moved",
    "parts",
    "peers",
    "readers",
    "round",
  )

  def __init__(
    self,
    round_: RoundId,
    parts: Any,
    peers: Any,
    readers: Any,
    me: int,
    now: float,
  ):
    self.round, self.parts, self.peers = round_, parts, peers
    self.readers, self.me = readers, me
    # Of each member, those that it has in the round, one after the other.
    self.gradients: dict[int, tuple[Any, ...]] = {}
    self.means: dict[int, int] = {}
    self.moved, self.ended = now, False

  def lacks(self) -> list[int]:
    """Indices of the members whose bytes have not come."""
    return [
      j
      for j in range(len(self.peers))
      if j not in self.means and (j not in self.gradients or self.me < 0)
    ] or [j for j in range(len(self.peers)) if j not in self.means]


class Node:
  """A process as the network knows it: its clock, and its connections."""

  over = ""
  node: Any

  def __init__(
    self, world: World, name: str, index: int, rate: float, offset: float
  ):
    self.world, self.name, self.index = world, name, index
    self.rate, self.offset = rate, offset
    self.alive, self.paused_until = True, -math.inf
    # Seconds of the world in which it was stopped, and since when it is.
    self.slept, self.stopped_at = 0.0, 0.0
    self.backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
    # What has yet to be taken by the core of an event loop that is busy, while
    # its transport goes on; and the peers whose loss is among that.
    self.inbox: list[ins.Input] = []
    self.busy_until = -math.inf
    self.losing: list[str] = []
    self.connections: dict[str, Connection] = {}
    # When each peer's heartbeat was heard last, and how that went so far.
    self.heard: dict[str, float] = {}
    self.gaps: dict[str, liveness.Silence] = {}
    self.timer = math.inf
    # Whether its host is gone, and tells nobody that its connections are.
    self.has_vanished = False
    self.aggregations: dict[RoundId, Aggregation] = {}
    # What has come before it was asked for, and from whom; lost with them.
    self.early: dict[Any, list[tuple[Any, ...]]] = {}
    self.fetching: tuple[int, str, float] | None = None
    # What it has told its coordinator of gradients and rounds, over which connection.
    self.said: list[tuple[Connection, Any]] = []
    # When each peer was lost last.
    self.lost_at: dict[str, float] = {}

  def now(self) -> float:
    """Its clock, which stands still while it is stopped."""
    return self.offset + self.rate * (self.world.now - self.slept)

  def awake(self) -> float:
    """For how long the world has run while this process did."""
    now = self.world.now
    sleeps = now - self.stopped_at if self.paused_until > now else 0.0
    return now - self.slept - sleeps


class Process(Node):
  """A process of a replica: its core, its arrays, and its training loop."""

  def __init__(self, world: World, name: str, index: int, start: int):
    setting = world.setting
    super().__init__(
      world, name, index, setting.rates[index], 1000.0 * (index + 1)
    )
    self.uid = digest(world.seed, len(world.all), index)
    # Until when what it sends of a gradient comes piece by piece, or of a snapshot.
    self.crawls_until = self.serves_until = -math.inf
    # The published state, and the speculative one.
    self.step = setting.starts[index] if setting.starts else 0
    self.version = start
    self.ahead: tuple[int, int] | None = None
    self.before: int = start
    # What the training loop is notified of, and how far it is.
    self.joined, self.requested = Joined(suspended=True), 1
    self.called = -1
    self.answers: dict[int, fx.Taken | fx.Resolved] = {}
    self.busy, self.over = False, ""
    self.error: tuple[str, str] | None = None
    self.submitted: msg.SubmitGradient | None = None
    # Gradients that have or will have an outcome; local steps of the next one;
    # and whether there is one that the submission has yet to be given.
    self.computed = self.local_steps = 0
    self.in_hand = False
    self.wants_leave = self.wants_finish = False
    self.leaves_since = math.inf
    # The step of the state that it wants to leave with.
    self.leaves_at = -1
    # When it last said that it needs a snapshot; infinity once it has one.
    self.needs_since = math.inf
    self.lease: tuple[int, ledger.Spans] = (-1, ())
    self.gradients: dict[int, int] = {}
    # What the coordinator must know of each slot, by its first position.
    self.work: dict[int, bytes] = {}
    # The step and the number of the snapshot that has come.
    self.fetched = -1, 0
    self.fail_snapshots = 0
    # Seconds until its event loop has what its training loop submits.
    self.hand_over = 0.0
    self.handed_over: collections.deque[msg.SubmitGradient] = (
      collections.deque()
    )
    self.dies_at_the_end = False
    # How many of its submissions have a byte too many; and whether one had.
    self.wrong_sizes, self.sent_wrong_size = 0, False
    # How often a connection breaks when it sends its part of a mean; and how much
    # of a gradient that it sends never arrives, though its connection lives.
    self.half_means = self.stuck = 0
    self.has_compiled = False
    # Seconds that its gradient has taken.
    self.took = 0.0
    # Whether it has aborted; whether it can't agree with the others, and has to be
    # refused.
    self.aborted = self.stranger = False
    # When a coordinator has heard its last call, and the step that it offered.
    self.called_at, self.offered = math.inf, -1
    # How often it has set hyperparameters.
    self.changes = 0
    # How many of its calls a coordinator has heard.
    self.hellos = 0
    # Whether it computes wrong gradients.
    self.is_faulty = False
    # When it was admitted, or its state was replaced.
    self.settled_at = math.inf
    # When a coordinator has taken it as a member last.
    self.welcomed_at = -math.inf
    config = config_of(setting)
    self.me = Me(
      name,
      index,
      f"at {name}",
      Start(self.step, str(start)),
      COORDINATOR,
      "at the coordinator",
      wants_inner=setting.policy is not None or setting.alone,
    )
    self.config = config
    self.node = Client(config, self.me)
    samples = 0
    if setting.data is not None:
      samples = setting.data.unit(setting.needed) // setting.local_steps
    learns = setting.policy is not None
    add = digest
    if setting.window:
      add = functools.partial(sums.added, setting.data)
    self.submission = Submission(
      self,
      add,
      max_staleness=None if learns else setting.max_staleness,
      samples=samples,
      window=setting.window,
    )

  # As `TrainingInbox`.

  @property
  def published(self) -> Published:
    return Published(self.step, self.version)

  @property
  def left(self) -> bool:
    """Whether its replica has left the run."""
    return self.over == "left"

  @property
  def finished(self) -> str | None:
    return self.over or None

  def answer(self, sequence: int) -> fx.Taken | fx.Resolved | None:
    return self.answers.get(sequence)

  @property
  def pending(self) -> msg.SubmitGradient | None:
    """The submission without an answer, if there is one."""
    sequence = self.submission.pending
    return None if sequence in (-1, *self.answers) else self.submitted

  def waits_for_newer(self) -> bool:
    """Whether its training loop can't go on from what it has."""
    return not self.busy and bool(self.submission.waits())


class Chief(Node):
  """The coordinator's process."""

  def __init__(self, world: World, rate: float):
    super().__init__(world, COORDINATOR, -1, rate, 5000.0)
    # After how many more effects it dies.
    self.dies_after = -1
    # When it got each gradient last, by its process and number.
    self.has: dict[tuple[str, int], float] = {}
    history = History()
    for record in world.log:
      history.apply(record)
    number = history.epoch + 1
    configure = functools.partial(configured, world.setting)
    self.node = Coordinator(configure, history, f"nonce {number}")


def config_of(setting: Setting) -> Config:
  """What all replicas of a world have in common."""
  rules = Rules(
    replicas_to_aggregate=setting.needed,
    total_num_replicas=setting.replicas,
    max_staleness=setting.max_staleness,
    lower_on_leave=setting.lower_on_leave,
    lower_on_loss=setting.lower_on_loss,
    inline_bytes=8 if setting.inline else None,
    alone=setting.alone,
    timeout=TIMEOUT,
    transfer_timeout=TRANSFER_TIMEOUT,
    silence_timeout=None if setting.adaptive else SILENCE_TIMEOUT,
    fingerprint_every=setting.fingerprint_every,
    max_skipped=setting.max_skipped,
  )
  job = Job((("optimizer", "the one"),), rules, data=setting.data)
  return configured(setting, job)


def configured(setting: Setting, job: Job) -> Config:
  """What follows from a job."""
  return Config(job, functools.partial(_average, setting), setting.policy)


class World:
  """All of it; `run` lets it happen.

  Attributes:
    has_nonsense: whether a process sends what has to be refused.
    looks_inside: whether deadlines are checked, which takes long.
    copies_take: seconds that a snapshot or a fingerprint takes, beside the
      usual ones.
    snapshots_take: seconds that a snapshot is on its way, beside.
  """

  has_nonsense = looks_inside = False
  copies_take = snapshots_take = 0.0

  def __init__(self, setting: Setting, seed: int, checker: Any = None):
    self.setting, self.seed = setting, seed
    self.random = random.Random(seed)
    self.now = 0.0
    self.count = 0
    self.heap: list[tuple[float, int, Callable[..., None], Any]] = []
    self.all: list[Process] = []
    self.by_name: dict[str, Process] = {}
    # State that outlives a coordinator.
    self.log: list[Record] = []
    # Stopped or busy processes and cut connections, from when to when.
    self.absences: list[tuple[tuple[str, ...], float, float]] = []
    # When the coordinator announced a round to its members.
    self.begun: dict[RoundId, float] = {}
    # Those that somebody could not complete.
    self.failed: set[RoundId] = set()
    # Pairs of names that are cut off from each other, one way, and until when.
    self.cuts: dict[tuple[str, str], float] = {}
    self.events = 0
    self.trace: list[str] | None = None
    self.transcript: list[str] | None = None
    self.checker = checker
    # Whether a process was killed for good; and replicas of which launchers know
    # that they have ended before they joined.
    self.spared = False
    self.absent: tuple[int, ...] = ()
    self.looks_inside = seed % 32 == 7
    # From when on faults excuse nothing but what they have killed.
    self.quiet_at = 0.0
    # From when to when faults may keep a step from being taken.
    self.troubles: list[tuple[float, float]] = []
    self.silences = deadlines.silence(TIMEOUT)
    self.longest_silence = (
      self.silences.ceiling if setting.adaptive else SILENCE
    )
    self.chief = self.start_coordinator()
    for index in range(setting.replicas):
      never = (index, "never joins") in setting.bad
      self.spared = self.spared or never or index in setting.strangers
      if not never:
        self.start(index)

  def add_fault(self, begin: float, end: float) -> None:
    """A fault lasts from then to then; then all find each other again."""
    rest = self.longest_silence + CONNECT + 3 * SILENCE_TIMEOUT
    self.troubles.append((begin, end + rest))

  def had_no_fault(self, since: float) -> bool:
    """Whether no fault could keep a step from being taken since then."""
    return not (self.had_fault(since) or self.spared)

  def had_fault(self, since: float) -> bool:
    """Whether a fault was under way since then."""
    return any(
      begin <= self.now and end >= since for begin, end in self.troubles
    )

  # Time.

  def at(self, time: float, action: Callable[..., None], *args: Any) -> None:
    self.count += 1
    heapq.heappush(self.heap, (time, self.count, action, args))

  def delay(self, mean: float) -> float:
    # Mostly about the mean, sometimes much longer.
    r = self.random.random()
    return mean * (0.5 + r if r < 0.95 else 20.0 * r)

  def run(self, until: float, done: Callable[[], bool]) -> None:
    heap = self.heap
    while heap:
      time, _, action, args = heapq.heappop(heap)
      if time > until:
        heapq.heappush(heap, (time, 0, action, args))
        self.now = until
        return
      self.now = time
      self.events += 1
      assert self.events < MOST_EVENTS, "busy without end"
      action(*args)
      if done():
        return

  def say(self, text: str) -> None:
    """Adds an event to the trace, which helps to mend the core."""
    if self.trace is not None:
      self.trace.append(f"{self.now:9.4f}  {text}")

  def tell(self, text: str) -> None:
    """Adds what happened to the transcript, in a person's words."""
    if self.transcript is not None:
      self.transcript.append(f"{self.now:9.3f} s  {text}")
    self.say(text)

  # Processes.

  def start(self, index: int, stranger: bool = False) -> Process:
    """Starts a process for this replica."""
    name = f"{'abcdefgh'[index]}{sum(p.index == index for p in self.all)}"
    process = Process(self, name, index, self.brought(index))
    if stranger or index in self.setting.strangers:
      process.stranger = True
      job = codec.replace(
        process.config.job, agreement=(("optimizer", "another one"),)
      )
      process.config = dataclasses.replace(process.config, job=job)
      process.node = Client(process.config, process.me)
    self.all.append(process)
    self.by_name[name] = process
    self.tell(f"{name} starts")
    if self.setting.adaptive:
      self.at(self.now + HEARTBEAT, self.beat, process)
    self.at(self.now, self.input, process, ins.Started())
    return process

  def brought(self, index: int) -> int:
    """The version that a replica starts from."""
    if not self.setting.same_start:
      return digest(self.seed, index, len(self.all))
    starts = self.setting.starts
    return digest(self.seed, starts[index] if starts else 0)

  def start_coordinator(self) -> Chief:
    """Starts the coordinator, from its log."""
    chief = self.chief = Chief(self, self.setting.rates[7])
    self.by_name[COORDINATOR] = chief  # type: ignore[assignment]
    self.tell("the coordinator starts")
    if self.checker is not None:
      self.checker.journal_opened(chief.node.history.recent)
    if self.setting.adaptive:
      self.at(self.now + HEARTBEAT, self.beat, chief)
    self.at(self.now, self.input, chief, ins.Started())
    for process in self.all:
      # To the host that is back, connections of before are unknown.
      connection = process.connections.get(COORDINATOR)
      if connection is not None and connection.other(process).has_vanished:
        time = self.now + HEARTBEAT * self.random.random()
        self.at(time, self.lose, connection, process, "broken", "reset")
    if self.absent:  # Launchers tell each coordinator.
      self.at(self.now, self.input, chief, self.launched())
    return chief

  def launched(self) -> ins.Received:
    """The launcher's report of replicas that have ended before they joined."""
    host = msg.Host("", 0, "", "the launcher", ended=self.absent)
    return ins.Received("launcher", host)

  def restart_coordinator(self) -> None:
    """Starts it again, unless it lives."""
    if not self.chief.alive:
      self.start_coordinator()

  def lose_power(self, records: int) -> None:
    """The coordinator's host loses power, and what was written last."""
    self.kill(self.chief)
    if self.checker is not None:
      records = self.checker.log_lost(records)
    del self.log[len(self.log) - records :]

  def input(self, process: Process, input_: ins.Input) -> None:
    """Gives a process an input, now or when it continues."""
    if not process.alive:
      return
    if process.paused_until > self.now:
      process.backlog.append((self.input, (process, input_)))
      return
    if process.busy_until > self.now or process.inbox:
      process.inbox.append(input_)
      return
    self.give(process, input_)

  def give(self, process: Process, input_: ins.Input) -> None:
    """The core takes an input."""
    if self.trace is not None and not isinstance(input_, ins.TimePassed):
      self.say(f"{process.name} <- {_short(input_)}")
    if isinstance(input_, ins.PeerLost):
      process.losing.remove(input_.peer)
    elif isinstance(input_, ins.Received):
      if isinstance(input_.message, msg.Welcome):
        process.welcomed_at = self.now
      elif isinstance(input_.message, msg.Hello):
        caller = self.by_name[input_.peer]
        caller.called_at = self.now
        caller.hellos += 1
        caller.offered = input_.message.start.step
      elif isinstance(input_.message, msg.SubmitGradient):
        key = input_.peer, input_.message.sequence
        self.chief.has[key] = self.now
    for effect in process.node.step(input_, process.now()):
      if process is self.chief and process.dies_after >= 0:
        if not process.dies_after:
          self.kill(process)
          self.at(self.now + 0.5, self.restart_coordinator)
          return
        process.dies_after -= 1
      self.effect(process, effect)
      if not process.alive:
        return
    self.set_timer(process)
    if self.looks_inside and self.events % 5 == 0 and self.checker is not None:
      self.checker.nothing_is_due(process)

  def lag(self, process: Process, duration: float) -> None:
    """An event loop is busy for a while; its transport continues."""
    if not process.alive:
      return
    self.tell(f"{process.name} is busy for {duration:.2f} s")
    self.absences.append(((process.name,), self.now, self.now + duration))
    process.busy_until = max(process.busy_until, self.now + duration)
    self.at(process.busy_until, self.catch_up, process)

  def catch_up(self, process: Process) -> None:
    """The core processes what came in the meantime."""
    if process.paused_until > self.now:
      process.backlog.append((self.catch_up, (process,)))
      return
    while process.inbox and process.alive and process.busy_until <= self.now:
      self.give(process, process.inbox.pop(0))

  def set_timer(self, process: Process) -> None:
    due = process.node.deadline()
    if due < math.inf:
      time = (due - process.offset) / process.rate + process.slept
      time = max(time, self.now)
      if time < process.timer - 1e-9:
        process.timer = time
        self.at(time + 1e-6, self.ring, process, time)
    elif (
      self.checker is not None
      and not process.inbox
      and process is not self.chief
    ):
      self.checker.no_deadline(process)

  def ring(self, process: Process, time: float) -> None:
    if process.timer == time:
      process.timer = math.inf
      if process.paused_until > self.now:
        process.backlog.append((self.input, (process, ins.TimePassed())))
      else:
        self.input(process, ins.TimePassed())

  def kill(self, process: Process) -> None:
    """Kills a process; its peers' kernels notice."""
    if not process.alive:
      return
    self.tell(f"{process.name} is killed")
    if process is self.chief:
      # The next one has its name, and is awake.
      self.absences = [
        (who, begin, min(end, self.now) if who == (process.name,) else end)
        for who, begin, end in self.absences
      ]
    self.close(process, "broken", "it was killed")

  def vanish(self, process: Process) -> None:
    """A process's host is gone; its peers hear nothing of it any more."""
    if not process.alive:
      return
    self.tell(f"the host of {process.name} is gone")
    process.has_vanished = True
    self.close(process, "silent", "nothing heard")

  def close(self, process: Process, how: str, reason: str) -> None:
    process.alive = False
    for connection in list(process.connections.values()):
      connection.open[process.name] = False
      other = connection.other(process)
      known = other.connections.get(process.name) is connection
      if connection.ready > self.now and not known:
        # What waited for the connection to stand dies with the process.
        connection.open[other.name] = False
      elif process.has_vanished:
        until = self.now + self.silence(other, process) / other.rate
        self.absences.append(((process.name, other.name), self.now, until))
        self.at(until, self.lose, connection, other, how, reason)
      else:
        self.deliver_loss(connection, other, how, reason)
    process.connections.clear()
    backlog, process.backlog = process.backlog, []
    for action, args in backlog:
      if action == self.accept:
        action(*args)
    if self.checker is not None and process is not self.chief:
      self.checker.died(process)

  def pause(self, process: Process, duration: float) -> None:
    """Stops a process for a while; its connections stay, and are silent."""
    if not process.alive:
      return
    self.tell(f"{process.name} is stopped for {duration:.1f} s")
    if process.paused_until <= self.now:
      process.stopped_at = self.now
    process.paused_until = max(process.paused_until, self.now + duration)
    absence = (process.stopped_at, process.paused_until)
    self.absences.append(((process.name,), *absence))
    self.at(process.paused_until, self.resume, process)
    if self.setting.adaptive:
      self.at(self.now + HEARTBEAT, self.listen, process)
    elif duration > SILENCE:
      awake = {other.name: other.awake() for other in self.all}
      self.at(self.now + SILENCE, self.silent, process, awake)

  def beat(self, process: Process) -> None:
    """Delivers to all that can hear a process."""
    if not process.alive:
      return
    self.at(self.now + HEARTBEAT, self.beat, process)
    if max(process.paused_until, process.busy_until) > self.now:
      return
    for connection in process.connections.values():
      other = connection.other(process)
      cut = self.blocked_until(process, other) > self.now
      if not cut and other.alive and connection.open[other.name]:
        self.hear(other, process)

  def hear(self, process: Process, peer: Process) -> None:
    """A heartbeat has come."""
    last = process.heard.get(peer.name)
    process.heard[peer.name] = awake = process.awake()
    if last is not None:
      self.gaps(process, peer).add(awake - last)

  def gaps(self, process: Process, peer: Process) -> liveness.Silence:
    gaps = process.gaps.get(peer.name)
    if gaps is None:
      gaps = process.gaps[peer.name] = liveness.Silence(self.silences)
    return gaps

  def silence(self, process: Process, peer: Process) -> float:
    """For how long a process bears not to hear of another one."""
    if not self.setting.adaptive:
      return SILENCE
    return self.gaps(process, peer).deadline

  def listen(self, process: Process) -> None:
    """Whether peers of a stopped process have waited long enough."""
    if not process.alive or process.paused_until <= self.now:
      return
    self.at(self.now + HEARTBEAT / 4, self.listen, process)
    for connection in list(process.connections.values()):
      other = connection.other(process)
      awake = other.awake()
      silent = awake - other.heard.setdefault(process.name, awake)
      if silent > self.silence(other, process):
        for end in connection.ends:
          self.lose(connection, end, "silent", "nothing heard")

  def silent(self, process: Process, since: dict[str, float]) -> None:
    """Whether peers of a stopped process have waited long enough.

    Args:
      process: it.
      since: for how long each of its peers was awake when it was stopped.
    """
    for connection in list(process.connections.values()):
      other = connection.other(process)
      awake = other.awake()
      short = SILENCE - (awake - since.get(other.name, awake - SILENCE))
      if short > 1e-6:  # It slept, too.
        time = max(self.now, other.paused_until) + short
        self.at(time, self.silent_to, connection, process, time - SILENCE)
        continue
      for end in connection.ends:
        self.lose(connection, end, "silent", "nothing heard")

  def silent_to(
    self, connection: Connection, process: Process, since: float
  ) -> None:
    """The same for one peer that slept; unless it was heard `since`."""
    if process.paused_until > self.now and process.stopped_at <= since:
      for end in connection.ends:
        self.lose(connection, end, "silent", "nothing heard")

  def resume(self, process: Process) -> None:
    if not process.alive or process.paused_until > self.now:
      return
    self.tell(f"{process.name} goes on")
    process.slept += self.now - process.stopped_at
    process.stopped_at = self.now
    backlog, process.backlog = process.backlog, []
    for index, (action, args) in enumerate(backlog):
      if process.paused_until > self.now:
        process.backlog += backlog[index:]
        return
      action(*args)

  def strike_at_the_end(self) -> None:
    """Kills the processes that are to die before the coordinator learns of the end."""
    for process in self.all:
      if process.alive and process.dies_at_the_end:
        self.at(self.now, self.kill, process)

  # Network.

  def blocked_until(self, sender: Process, receiver: Process) -> float:
    return self.cuts.get((sender.name, receiver.name), -math.inf)

  def cut(self, a: Process, b: Process, duration: float) -> None:
    """Nothing of one process's reaches another one for a while."""
    self.tell(f"{a.name} can't reach {b.name} for {duration:.1f} s")
    self.absences.append(((a.name, b.name), self.now, self.now + duration))
    key = (a.name, b.name)
    until = max(self.now + duration, self.cuts.get(key, 0.0))
    self.cuts[key] = until
    connection = a.connections.get(b.name)
    silence = self.silence(b, a)
    if connection is not None and duration > silence:
      self.at(self.now + silence, self.cut_silent, connection, a, b)

  def cut_silent(self, connection: Connection, a: Process, b: Process) -> None:
    if self.blocked_until(a, b) > self.now:
      self.lose(connection, b, "silent", "nothing heard")
      self.deliver_loss(connection, a, "broken", "the peer has closed it")

  def connect(self, process: Process, peer: str) -> None:
    other = self.by_name.get(peer)
    if peer in process.connections or other is None or other is process:
      return
    connection = other.connections.get(process.name)
    if connection is not None and connection.open[process.name]:
      # The other one is just connecting to this one.
      process.connections[peer] = connection
      return
    connection = Connection(process, other, self.now)
    process.connections[peer] = connection
    ready = self.now + 2 * self.delay(self.setting.latency)
    for ends in ((process, other), (other, process)):
      ready = max(ready, self.blocked_until(*ends) + 0.001)
    connection.last = dict.fromkeys(connection.last, ready)
    connection.ready = ready
    if (
      not other.alive
      and self.chief in (process, other)
      and not other.has_vanished
    ):
      # Its address refuses connections. Members have not met, and try again.
      connection.open[peer] = False
      why = "its address refuses connections"
      self.at(ready, self.lose, connection, process, "gone", why)
      return
    if not other.alive or ready > self.now + CONNECT:
      connection.open[peer] = False
      time = self.now + CONNECT
      self.at(time, self.lose, connection, process, "unreachable", "no answer")
      return
    self.at(ready, self.accept, connection, process, other)

  def accept(
    self, connection: Connection, process: Process, other: Process
  ) -> None:
    if not other.alive and other.index < 0 and not other.has_vanished:
      # The coordinator's host goes on, and resets it.
      connection.open[other.name] = False
      self.deliver_loss(connection, process, "broken", "it was killed")
    elif not other.alive:
      connection.open[other.name] = False
      time = self.now + CONNECT
      self.at(time, self.lose, connection, process, "unreachable", "no answer")
    elif other.paused_until > self.now:
      other.backlog.append((self.accept, (connection, process, other)))
    elif connection.open[other.name]:
      known = other.connections.get(process.name)
      if known is not None and known is not connection:
        self.lose(known, other, "replaced", "it has connected anew")
      other.connections[process.name] = connection

  def send(self, process: Process, peer: str, item: Any) -> None:
    match item:
      case msg.NeedsSnapshot():
        process.needs_since = self.now
      case msg.Failed():
        self.failed.add(item.round)
      case msg.Round():
        self.begun.setdefault(item.round, self.now)
      case msg.Rejected() if not self.has_nonsense:
        what = f"{process.name} refuses what {peer} says: {item}"
        self.checker.fail("A1", what)
    if self.setting.coded and isinstance(item, msg.Message):
      item = msg.MESSAGES.decode(msg.MESSAGES.encode(item))
    connection = process.connections.get(peer)
    if connection is None:
      return
    if isinstance(item, tuple) and item[0] == "gradient" and process.stuck:
      process.stuck -= 1
      return
    if isinstance(item, _SAID):
      process.said.append((connection, item))
    other = self.by_name[peer]
    time = self.now + self.delay(self.setting.latency)
    blocked = self.blocked_until(process, other)
    if blocked > time:
      time = blocked + self.delay(self.setting.latency)
      silence = self.silence(other, process)
      if blocked > self.now + silence:
        self.at(self.now + silence, self.cut_silent, connection, process, other)
    time = max(time, connection.last[peer])
    connection.last[peer] = time
    self.at(time, self.deliver, connection, process, other, item)

  def echo(self, process: Process) -> None:
    """Sends its messages again, as long as the coordinator is the same."""
    self.tell(f"{process.name} repeats itself")
    said, process.said = process.said[-6:], []
    for connection, item in said:
      peer = connection.other(process).name
      if process.connections.get(peer) is connection:
        self.send(process, peer, item)

  def deliver(
    self, connection: Connection, sender: Process, to: Process, item: Any
  ) -> None:
    if not to.alive or not connection.open[to.name]:
      return
    if to.paused_until > self.now:
      to.backlog.append((self.deliver, (connection, sender, to, item)))
      return
    if to.connections.get(sender.name) is not connection:
      self.accept(connection, sender, to)
    if isinstance(item, tuple):
      self.array(to, sender, *item)
    else:
      self.input(to, ins.Received(sender.name, item))

  def deliver_loss(
    self, connection: Connection, to: Process, how: str, reason: str
  ) -> None:
    """Tells one end that the other one has closed the connection."""
    sender = connection.other(to)
    time = self.now + self.delay(self.setting.latency)
    blocked = self.blocked_until(sender, to)
    if blocked > time:
      time = min(blocked, self.now + self.silence(to, sender))
    time = max(time, connection.last[to.name])
    connection.last[to.name] = time
    self.at(time, self.lose, connection, to, how, reason)

  def reset(self, process: Process, other: Process) -> None:
    """The connection between two processes breaks."""
    connection = process.connections.get(other.name)
    if connection is not None:
      self.tell(f"{process.name} and {other.name}: connection reset")
      for end in connection.ends:
        self.deliver_loss(connection, end, "broken", "reset")

  def lose(
    self, connection: Connection, end: Process, how: str, reason: str
  ) -> None:
    if not connection.open[end.name] or not end.alive:
      return
    if end.paused_until > self.now:
      end.backlog.append((self.lose, (connection, end, how, reason)))
      return
    connection.open[end.name] = False
    peer = connection.other(end)
    end.lost_at[peer.name] = self.now
    if end.connections.get(peer.name) is connection:
      del end.connections[peer.name]
    if connection.open[peer.name] and how in _CLOSES:
      self.deliver_loss(connection, peer, "broken", "the peer has closed it")
    for aggregation in list(end.aggregations.values()):
      self.peer_lost(end, aggregation, peer.name)
    if end.fetching is not None and end.fetching[1] == peer.name:
      transfer = end.fetching[0]
      end.fetching = None
      self.input(end, ins.SnapshotFailed(transfer, reason))
    self.forget(end, peer.name)
    end.heard.pop(peer.name, None)
    end.losing.append(peer.name)
    self.input(end, ins.PeerLost(peer.name, how, reason))

  def disconnect(self, process: Process, peer: str, reason: str) -> None:
    connection = process.connections.pop(peer, None)
    if connection is not None:
      connection.open[process.name] = False
      other = self.by_name[peer]
      self.deliver_loss(connection, other, "left", reason)
      self.forget(process, peer)
      for aggregation in list(process.aggregations.values()):
        self.peer_lost(process, aggregation, peer)

  def forget(self, process: Process, peer: str) -> None:
    """What has come from a peer and was not asked for yet goes with it."""
    for key, items in list(process.early.items()):
      kept = [item for item in items if item[0] != peer]
      if kept:
        process.early[key] = kept
      else:
        del process.early[key]

  def garble(self, process: Process, other: Process, how: str) -> None:
    """Sends bytes that are not quite a message."""
    data = msg.MESSAGES.encode(msg.Done(RoundId(0, 0, 1)))
    bad = {
      "truncated": data[: len(data) // 2],
      "longer": data + b"x",
      "another version": data.replace(b"Done", b"Gone"),
      "random": self.random.randbytes(64),
      "empty": b"",
    }[how]
    self.tell(f"{process.name} sends {other.name} bytes ({how})")
    connection = process.connections.get(other.name)
    if connection is None or not connection.open[other.name]:
      return
    try:
      msg.MESSAGES.decode(bad)
    except codec.BadMessage as error:
      time = max(self.now, connection.last[other.name])
      malformed = ins.Malformed(process.name, str(error))
      self.at(time, self.input, other, malformed)
    else:
      assert self.checker is not None
      self.checker.fail("A1", f"bytes that are {how} are taken for a message")

  # Aggregation.

  def begin(
    self,
    process: Process,
    round_: RoundId,
    parts: Any,
    peers: Any,
    readers: Any,
    me: int,
  ) -> None:
    aggregation = Aggregation(round_, parts, peers, readers, me, self.now)
    process.aggregations[round_] = aggregation
    for j, peer in enumerate(peers):
      if peer.process in process.losing:
        self.fail(process, aggregation, j, "its connection was lost just now")
        return
      self.connect(process, peer.process)
    if me >= 0:
      own = [
        p.sequence for p in parts if p.incarnation == peers[me].incarnation
      ]
      if not process.gradients.keys() >= {*own}:
        aggregation.ended = True
        failed = msg.Failed(round_, None, "it has no such gradient")
        self.at(self.now, self.input, process, failed)
        return
      gradient = tuple(process.gradients[sequence] for sequence in own)
      for j, peer in enumerate(peers):
        if j != me:
          item = ("gradient", round_, me, gradient)
          self.send_slowly(process, aggregation, peer.process, item)
      aggregation.gradients[me] = gradient
    if not round_.early:
      self.limit_wait(process, aggregation)
    for _, *item in process.early.pop(round_, []):
      self.arrived(process, aggregation, *item)
    self.at(self.now, self.go_on_later, process, aggregation)

  def send_slowly(
    self,
    process: Process,
    aggregation: Aggregation,
    peer: str,
    item: tuple[Any, ...],
  ) -> None:
    """Sends a gradient, in pieces for as long as the process crawls."""
    if process.crawls_until <= self.now:
      self.send(process, peer, item)
      return
    going = process.aggregations.get(aggregation.round) is aggregation
    if process.alive and going and not aggregation.ended:
      aggregation.moved = self.now
      self.send(process, peer, ("piece", aggregation.round, 0, 0))
      args = (process, aggregation, peer, item)
      self.at(self.now + TRANSFER_TIMEOUT / 3, self.send_slowly, *args)

  def check_moves(
    self, process: Process, aggregation: Aggregation, slept: float
  ) -> None:
    """Fails an aggregation if nothing has moved; `slept` as of the last look."""
    if aggregation.ended or not process.alive:
      return
    if process.paused_until > self.now:
      process.backlog.append((self.check_moves, (process, aggregation, slept)))
      return
    aggregation.moved += process.slept - slept
    idle = self.now - aggregation.moved
    if idle >= TRANSFER_TIMEOUT - 1e-6:
      self.fail(process, aggregation, aggregation.lacks()[0], "nothing moves")
    else:
      time = aggregation.moved + TRANSFER_TIMEOUT
      self.at(time, self.check_moves, process, aggregation, process.slept)

  def array(
    self,
    process: Process,
    sender: Process,
    kind: str,
    round_: RoundId,
    index: int,
    value: int,
  ) -> None:
    if kind == "snapshot":
      self.snapshot(process, sender, round_, index, value)
      return
    aggregation = process.aggregations.get(round_)
    if aggregation is None:
      item = (sender.name, kind, index, value)
      process.early.setdefault(round_, []).append(item)
    elif not aggregation.ended:
      self.arrived(process, aggregation, kind, index, value)
      self.go_on(process, aggregation)

  def arrived(
    self,
    process: Process,
    aggregation: Aggregation,
    kind: str,
    index: int,
    value: int,
  ) -> None:
    aggregation.moved = self.now
    if kind == "gradient":
      aggregation.gradients[index] = value
    elif kind == "mean":
      aggregation.means[index] = value

  def go_on(self, process: Process, aggregation: Aggregation) -> None:
    me, n = aggregation.me, len(aggregation.peers)
    if me >= 0 and me not in aggregation.means:
      if len(aggregation.gradients) < n:
        return
      gradients = tuple(g for j in range(n) for g in aggregation.gradients[j])
      weights = tuple(p.weight for p in aggregation.parts)
      mean = digest(me, self.sum(gradients, weights))
      aggregation.means[me] = mean
      others = [p for j, p in enumerate(aggregation.peers) if j != me]
      if process.half_means and others:
        process.half_means -= 1
        self.reset(process, self.by_name[others.pop().process])
      for peer in others:
        item = ("mean", aggregation.round, me, mean)
        self.send(process, peer.process, item)
      for peer in aggregation.readers:
        self.connect(process, peer.process)
        item = ("mean", aggregation.round, me, mean)
        self.send(process, peer.process, item)
    if len(aggregation.means) == n:
      aggregation.ended = True
      if self.checker is not None:
        self.checker.collected[process.name].add(aggregation.round)
        if me >= 0:
          self.checker.has_all(process, aggregation.round)
      self.input(process, msg.Done(aggregation.round))

  def peer_lost(
    self, process: Process, aggregation: Aggregation, peer: str
  ) -> None:
    if aggregation.ended:
      return
    for j, result in enumerate(aggregation.peers):
      lacks = j not in aggregation.means
      if result.process == peer and lacks and j != aggregation.me:
        self.fail(process, aggregation, j, "its connection was lost")
        return

  def fail(
    self, process: Process, aggregation: Aggregation, j: int, reason: str
  ) -> None:
    aggregation.ended = True
    self.failed.add(aggregation.round)
    if self.checker is not None:
      self.checker.changed_at = self.now
    process.aggregations.pop(aggregation.round, None)
    failed_replica = aggregation.peers[j].incarnation
    failed = msg.Failed(aggregation.round, failed_replica, reason)
    self.at(self.now, self.input, process, failed)

  # Snapshots.

  def snapshot(
    self,
    process: Process,
    sender: Process,
    transfer: Any,
    step: int,
    value: int,
  ) -> None:
    if process.fetching is None or process.fetching[0] != transfer:
      process.early[transfer] = [(sender.name, step, value)]
      return
    process.fetching = None
    if process.fail_snapshots:
      process.fail_snapshots -= 1
      failed = ins.SnapshotFailed(transfer, "it was cut short")
      self.input(process, failed)
      return
    process.fetched = step, value
    self.input(process, ins.SnapshotFetched(transfer, step))

  def fetch_times_out(self, process: Process, transfer: int) -> None:
    if process.paused_until > self.now:
      time = process.paused_until + TRANSFER_TIMEOUT
      self.at(time, self.fetch_times_out, process, transfer)
      return
    if process.fetching is not None and process.fetching[0] == transfer:
      server = self.by_name[process.fetching[1]]
      cut = self.blocked_until(server, process) > self.now
      if server.serves_until > self.now >= server.paused_until and not cut:
        # Its bytes come all the time.
        time = self.now + TRANSFER_TIMEOUT
        self.at(time, self.fetch_times_out, process, transfer)
        return
      process.fetching = None
      self.input(process, ins.SnapshotFailed(transfer, "nothing moves"))

  # The core's effects.

  def effect(self, process: Process, effect: fx.Effect) -> None:
    if self.trace is not None:
      self.say(f"{process.name} -> {_short(effect)}")
    kind = type(effect)
    if kind is fx.Send:
      for peer in effect.peers:
        self.send(process, peer, effect.message)
    else:
      name = _METHODS.get(kind)
      if name is None:
        name = _METHODS[kind] = f"on_{kind.__name__.lower()}"
      getattr(self, name)(process, effect)

  def on_userun(self, process: Process, effect: fx.UseRun) -> None:
    pass

  def on_connect(self, process: Process, effect: fx.Connect) -> None:
    self.connect(process, effect.peer)

  def on_disconnect(self, process: Process, effect: fx.Disconnect) -> None:
    self.disconnect(process, effect.peer, effect.reason)

  def on_append(self, process: Chief, effect: fx.Append) -> None:
    record = effect.record
    if self.setting.coded:
      record = RECORDS.decode(RECORDS.encode(record))
    self.log.append(record)
    if self.checker is not None:
      self.checker.appended(record)

  def sum(self, gradients: tuple[Any, ...], weights: tuple[float, ...]) -> int:
    """The sum of a step: of its parts, or of its slots in a tree's order."""
    return _sum(self.setting, gradients, weights)

  def on_aggregate(self, process: Process, effect: fx.Aggregate) -> None:
    self.begin(
      process,
      effect.round,
      effect.parts,
      effect.peers,
      effect.readers,
      -1 if effect.me is None else effect.me,
    )

  def go_on_later(self, process: Process, aggregation: Aggregation) -> None:
    if not aggregation.ended and process.alive:
      self.go_on(process, aggregation)

  def limit_wait(self, process: Process, aggregation: Aggregation) -> None:
    """From now on it fails if nothing moves for a member's `Deadlines.transfer`."""
    time = self.now + TRANSFER_TIMEOUT
    self.at(time, self.check_moves, process, aggregation, process.slept)

  def on_release(self, process: Process, effect: fx.Release) -> None:
    aggregation = process.aggregations.pop(effect.round, None)
    if aggregation is not None:
      aggregation.ended = True

  def on_apply(self, process: Process, effect: fx.Apply) -> None:
    if isinstance(effect.mean, bytes):
      (mean,) = struct.unpack("<q", effect.mean)
    else:
      means = process.aggregations[effect.mean].means
      mean = digest(*(means[j] for j in sorted(means)))
    after = digest(process.version, mean, *dict(effect.hyperparams).values())
    process.ahead = (process.step + 1, after)

  def on_publish(self, process: Process, effect: fx.Publish) -> None:
    assert process.ahead is not None, "nothing to publish"
    assert process.ahead[0] == effect.step, "another step is published"
    process.before = process.version
    process.step, process.version = process.ahead
    process.ahead = None
    if process.submission.ended is not None or self.setting.window:
      self.at(self.now, self.next_gradient, process)
    if self.checker is not None:
      self.checker.applied(process)
      self.checker.published(process)

  def on_restore(self, process: Process, effect: fx.Restore) -> None:
    process.needs_since, process.settled_at = math.inf, self.now
    process.step, process.version = process.fetched
    process.ahead = None
    assert process.step == effect.step
    if process.submission.ended is not None or self.setting.window:
      self.at(self.now, self.next_gradient, process)
    if self.checker is not None:
      self.checker.published(process)

  def on_serve(self, process: Process, effect: msg.Serve) -> None:
    assert process.step >= effect.at_least
    self.connect(process, effect.to)
    item = ("snapshot", effect.transfer, process.step, process.version)
    takes = self.snapshots_take
    process.serves_until = self.now + takes
    if self.copies_take:
      takes += self.copies_take * self.random.random()
    if takes:
      self.at(self.now + takes, self.send, process, effect.to, item)
    else:
      self.send(process, effect.to, item)

  def on_fetch(self, process: Process, effect: msg.Fetch) -> None:
    if effect.source in process.losing:
      failed = ins.SnapshotFailed(effect.transfer, "it was lost just now")
      self.at(self.now, self.input, process, failed)
      return
    self.connect(process, effect.source)
    process.fetching = (effect.transfer, effect.source, self.now)
    self.at(
      self.now + TRANSFER_TIMEOUT,
      self.fetch_times_out,
      process,
      effect.transfer,
    )
    early = process.early.pop(effect.transfer, None)  # type: ignore[call-overload]
    if early:
      sender, step, value = early[0]
      self.at(
        self.now,
        self.snapshot,
        process,
        self.by_name[sender],
        effect.transfer,
        step,
        value,
      )

  def on_takefingerprint(
    self, process: Process, effect: fx.TakeFingerprint
  ) -> None:
    taken = msg.Fingerprint(effect.step, str(process.version))
    # It takes a while, and training goes on meanwhile.
    time = self.now + self.delay(FINGERPRINT + self.copies_take)
    self.at(time, self.took_fingerprint, process, taken)

  def took_fingerprint(self, process: Process, taken: msg.Fingerprint) -> None:
    if self.checker is not None and process.alive:
      self.checker.fingerprint(process, taken)
    self.input(process, taken)

  def on_writejournal(self, process: Process, effect: fx.WriteJournal) -> None:
    if self.checker is not None:
      self.checker.noted(process, effect.note)

  def on_log(self, process: Process, effect: fx.Log) -> None:
    pass

  # Training loops.

  def on_admitted(self, process: Process, effect: fx.Admitted) -> None:
    process.joined.suspended = False
    # It may have become the coordinator, and what it has is the run's state now.
    process.needs_since = math.inf
    process.joined.incarnation = effect.incarnation
    if self.checker is not None:
      self.checker.admitted(process, effect)
      process.settled_at = self.now
    self.at(self.now, self.next_gradient, process)

  def on_suspended(self, process: Process, effect: fx.Suspended) -> None:
    process.joined.suspended = True
    process.settled_at = math.inf

  def on_leased(self, process: Process, effect: fx.Leased) -> None:
    process.lease = (effect.incarnation, effect.spans)
    self.at(self.now, self.next_gradient, process)

  def on_progressed(self, process: Process, effect: fx.Progressed) -> None:
    if self.checker is not None:
      self.checker.progressed(process, effect)

  def on_setrequested(self, process: Process, effect: fx.SetRequested) -> None:
    process.requested = effect.count

  def on_call(self, process: Process, effect: msg.Call) -> None:
    process.called = effect.step

  def on_taken(self, process: Process, effect: fx.Taken) -> None:
    process.answers[effect.sequence] = effect
    self.at(self.now, self.next_gradient, process)

  def on_resolved(self, process: Process, effect: fx.Resolved) -> None:
    if self.checker is not None:
      self.checker.resolved(process, effect)
    process.gradients.pop(effect.sequence, None)
    process.answers[effect.sequence] = effect
    self.at(self.now, self.next_gradient, process)

  def on_left(self, process: Process, effect: fx.Left) -> None:
    self.end_loop(process, "left")

  def on_finished(self, process: Process, effect: fx.Finished) -> None:
    self.end_loop(process, "finished")

  def on_fail(self, process: Process, effect: fx.Fail) -> None:
    process.error = (effect.error, effect.reason)
    self.end_loop(process, "failed")

  def end_loop(self, process: Process, how: str) -> None:
    process.over = how
    error, reason = process.error or ("", "")
    self.tell(f"{process.name} has {how}" + (error and f", {error}: {reason}"))
    process.submission.finish("finished")
    if self.checker is not None:
      counts = tuple(sorted(process.submission.counts.items()))
      self.checker.counts(process, process.computed, counts)
      self.checker.ended(process)
    # A moment later it closes its transport, and ends.
    self.at(self.now + 0.05, self.quit, process)

  def quit(self, process: Process) -> None:
    if process.alive:
      self.close(process, "left", "it has ended")

  def next_gradient(self, process: Process) -> None:
    """Goes on with a training loop, unless it computes or waits."""
    submission = process.submission
    if (
      not process.alive
      or process.over
      or process.busy
      or process.joined.incarnation < 0
      or process.wants_finish
      or process.leaves_since <= self.now
      or submission.waits()
    ):
      return
    if self.is_between(process):
      self.act(process, "on_answer")
      self.next_gradient(process)
    elif process.in_hand:
      self.act(process, "take_step", "")
      self.next_gradient(process)
    else:
      self.begin_unless_done(process)

  def begin_unless_done(self, process: Process) -> None:
    submission = process.submission
    done = submission.base.step >= self.setting.steps
    if process.wants_leave or (done and self.setting.leaves):
      process.leaves_since, process.leaves_at = self.now, process.step
      self.input(process, msg.Leave(lost=False))
      process.joined.suspended = True
    elif done:
      process.wants_finish = True
      self.input(process, msg.Finish("enough"))
    elif self.setting.data is None or submission.can_draw():
      self.act(process, "begin_gradient")

  def is_between(self, process: Process) -> bool:
    """Whether a call of `step` goes on, or was interrupted."""
    submission = process.submission
    submitted = submission.is_complete or submission.pending >= 0
    return (
      submitted or submission.ended is not None or submission.incarnation < 0
    )

  def act(self, process: Process, what: str, *how: str) -> None:
    """Does what a training loop does on what it has been notified of."""
    getattr(self, what)(process, process, *how)

  def on_answer(self, process: Process, seen: Process) -> None:
    submission = process.submission
    if submission.is_complete:
      self.submit(process)
    elif submission.pending >= 0:
      submission.on_answer()
    else:
      submission.resume(seen.joined.incarnation, seen.published)
      process.local_steps = 0

  def begin_gradient(self, process: Process, seen: Process) -> None:
    """Begins to compute a gradient, on samples if they are leased."""
    submission = process.submission
    if self.setting.data is not None and (
      submission.finish_if_over() or submission.draw() is None
    ):
      if submission.ended is not None or submission.is_complete:
        self.at(self.now, self.next_gradient, process)
      return
    self.compute(process)

  def compute(self, process: Process) -> None:
    process.busy = True
    mean = self.setting.compute[process.index] / self.setting.local_steps
    time = self.now + mean * (0.5 + self.random.random())
    if not process.has_compiled:
      time, process.has_compiled = time + self.setting.compiling, True
    process.took += time - self.now
    self.at(time, self.computed, process)

  def computed(self, process: Process) -> None:
    if not process.alive or process.over:
      return
    if process.paused_until > self.now:
      process.backlog.append((self.computed, (process,)))
      return
    process.busy = False
    chance, mishap = self.random.random(), ""
    for name, often in MISHAPS:
      if 0.0 <= chance < often:
        mishap = name
      chance -= often
    self.act(process, "take_step", mishap)
    self.next_gradient(process)

  def take_step(self, process: Process, seen: Process, mishap: str) -> None:
    """Does what `Replica.step` does with a gradient, or `abandon`."""
    submission = process.submission
    if self.is_between(process):
      process.in_hand = True
      return
    in_hand, process.in_hand = process.in_hand, False
    if in_hand and submission.is_empty:
      process.computed += 1
      submission.finish("stale", 1)
    elif submission.finish_if_over(1):
      process.computed += 1
    elif mishap == "is abandoned":
      process.computed += 1
      submission.abandon()
    else:
      submission.draws.keep()
      process.local_steps += 1
      if process.local_steps % self.setting.local_steps == 0:
        self.add(process, seen, mishap)

  def add(self, process: Process, seen: Process, mishap: str) -> None:
    process.computed += 1
    self.give_gradient(process, seen)
    if process.submission.is_complete:
      if mishap != "is interrupted before it submits":
        self.submit(process)
      if "interrupted" in mishap and self.setting.data is None:
        self.compute(process)  # Without having waited.

  def give_gradient(self, process: Process, seen: Process) -> None:
    """Adds a gradient, whose number stands for its batch."""
    part: Any = digest(process.uid, process.computed)
    if self.setting.window:
      part = self.slot(process)
    process.submission.add(part, str(process.computed), process.took)
    process.took = 0.0

  def slot(self, process: Process) -> sums.Nodes:
    """The gradient of a slot."""
    data, submission = self.setting.data, process.submission
    assert data is not None
    position = submission.draws.computed[0][0]
    ((span, value),) = sums.slot(data, submission.base.version, position)
    if process.is_faulty:
      value = digest(value, process.uid)
    process.work[position] = b""
    good = sums.is_finite(position, self.setting.not_finite)
    if self.is_bad_now(process) or not good:
      process.work[position] = audit.pack(position, audit.NOT_FINITE)
    elif data.audited(submission.draws.computed):
      process.work[position] = audit.pack(position, value.to_bytes(16))
    return ((span, value),)

  def is_bad_now(self, process: Process) -> bool:
    """Whether a bad replica's next gradient is not finite."""
    way = dict(self.setting.bad).get(process.index)
    if way == "at times":
      return self.random.random() < AT_TIMES
    return way == "always"

  def submit(self, process: Process, work: bytes = b"") -> None:
    total, payload = process.submission.total, b""
    # In a deterministic run, gradients that are not finite count as zeros.
    finite = total is None or self.random.random() > self.setting.not_finite
    finite = finite and (total is None or not self.is_bad_now(process))
    finite = finite or bool(self.setting.window)
    if total is not None and finite and self.setting.inline:
      numbers = [v for _, v in total] if self.setting.window else [total]
      payload = struct.pack(f"<{len(numbers)}q", *numbers)
    if process.wrong_sizes and finite:
      process.wrong_sizes, process.sent_wrong_size = 0, True
      payload += b"x"
    if total is not None and self.setting.window:
      gradients = process.submission.gradients
      work = b"".join([process.work[g.data[0][0]] for g in gradients])
    submitted = process.submission.submit(finite, payload, work=work)
    if total is not None:
      process.gradients[submitted.sequence] = total
    if total is not None and not self.setting.window:
      parts = [digest(process.uid, n) for n in json.loads(submitted.batches)]
      assert total == functools.reduce(digest, parts), (
        "another sum is submitted"
      )
    process.submitted = submitted
    if self.checker is not None:
      self.checker.submitted(process, submitted)
    if process.hand_over:
      process.handed_over.append(submitted)
      time = self.now + process.hand_over * self.random.random()
      self.at(time, self.take_submission, process)
    else:
      self.input(process, submitted)

  def take_submission(self, process: Process) -> None:
    """The event loop takes the oldest of what was handed over to it."""
    self.input(process, process.handed_over.popleft())


def _short(value: Any) -> str:
  text = repr(value)
  for old in ("Received", "early=None", "payload=b''", "batches=''"):
    text = text.replace(old + ", ", "")
  return text if len(text) < 400 else text[:400] + "..."


def _average(setting: Setting, parts: Any, payloads: Sequence[bytes]) -> bytes:
  """The mean of gradients that are sent inline."""
  values: tuple[Any, ...]
  if setting.window:
    assert setting.data is not None
    nodes = [tree.nodes_at(setting.data, part.data) for part in parts]
    values = tuple(
      tuple(zip(spans, struct.unpack(f"<{len(spans)}q", p), strict=True))
      for spans, p in zip(nodes, payloads, strict=True)
    )
  else:
    values = tuple(struct.unpack("<q", p)[0] for p in payloads)
  weights = tuple(part.weight for part in parts)
  return struct.pack("<q", _sum(setting, values, weights))


def _sum(
  setting: Setting, gradients: tuple[Any, ...], weights: tuple[float, ...]
) -> int:
  if setting.window:
    assert setting.data is not None
    return sums.whole(setting.data, gradients)
  return digest(gradients, weights)
