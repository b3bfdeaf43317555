"""Event-driven timing: the rules decide on every arrival, loss and return.

It simulates everything that the rules can do, at some ten thousand arrivals per
second; `array_engine` is for strategies that need less.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from optax_dist import quorum
from optax_dist.simulate import timing
from optax_dist.simulate.engines.draws import Draws
from optax_dist.simulate.strategy import Strategy

_ARRIVE, _FAIL, _RETURN, _NOTICE = range(4)
_STRATEGIES = {
  "gradient": "sync_replicas",
  "exchange": "elastic_average",
  "change": "local_updates",
}


class Failures(NamedTuple):
  """When replicas fail and come back.

  Attributes:
    rate: failures per second of a running replica.
    downtime: seconds from the detection of a failure until the replica is back;
      or several values of which one is drawn each time, infinite for never.
    unnoticed: seconds until a failure is detected, one drawn each time; none
      for immediately.
    takeovers: seconds without steps if the failed replica was the leader, one
      drawn each time; none for no leader.
    lowers: whether a loss lowers the number of gradients in a step.
  """

  rate: float
  downtime: float | tuple[float, ...]
  unnoticed: tuple[float, ...] = ()
  takeovers: tuple[float, ...] = ()
  lowers: bool = False

  @property
  def downtimes(self) -> tuple[float, ...]:
    """All possible downtimes."""
    down = self.downtime
    return down if isinstance(down, tuple) else (down,)


class Writer(Protocol):
  """The interface of a journal; see `optax_dist.coordinator.journal`."""

  def write(self, kind: str, /, **fields: Any) -> None:
    """Appends a record."""


class _Replica:
  """The current state of one replica.

  Attributes:
    computing: whether it computes, rather than waits for parameters.
    begun: computations so far; a planned arrival of an earlier one is void.
    token: when it last got a token.
    start: when it could start on it.
    since: when it last arrived, or failed.
    held: seconds spent on buffered gradients that are not committed yet.
    silent: whether it has failed, undetected so far.
  """

  def __init__(self) -> None:
    self.computing = self.silent = False
    self.begun = self.incarnation = 0
    self.local_step, self.count = 0, 1
    self.token = self.start = self.since = 0.0
    self.held: defaultdict[str, float] = defaultdict(float)

  def expects(self, number: int) -> bool:
    """Whether the computation with this number is still in progress."""
    return self.computing and number == self.begun


class _Engine:
  """A simulation in progress."""

  def __init__(
    self,
    strategy: Strategy,
    draws: Draws,
    replicas: int,
    communication: float,
    failures: Failures | None,
    rng: np.random.Generator,
    journal: Writer | None,
  ):
    self.strategy, self.draws, self.journal = strategy, draws, journal
    self.communication, self.failures, self.rng = communication, failures, rng
    self.state = quorum.init(
      strategy.replicas_to_aggregate,
      replicas,
      max_staleness=strategy.max_staleness,
      two_phase=False,
      lower_on_leave=failures is not None and failures.lowers,
    )
    self.leader, self.deaf = 0, 0.0
    self.now = self.ready = 0.0
    self.heap: list[tuple[float, int, int, int]] = []
    self.replicas = [_Replica() for _ in range(replicas)]
    self.commit_times: list[float] = []
    self.staleness: Counter[int] = Counter()
    self.applied, self.dropped, self.lost = np.zeros((3, replicas), np.int64)
    self.seconds = {cause: np.zeros(replicas) for cause in timing.CAUSES}

  def next_event(self) -> None:
    """Processes the next event."""
    self.now, replica, what, number = heapq.heappop(self.heap)
    if what == _FAIL:
      self.fail(replica)
    elif what == _NOTICE:
      self.notice(replica)
    elif what == _RETURN:
      one = self.replicas[replica]
      self.seconds["down"][replica] += self.now - one.since
      one.incarnation += 1
      self.join(replica)
    elif self.replicas[replica].expects(number):
      if self.now < self.deaf:  # There is no leader.
        heapq.heappush(self.heap, (self.deaf, replica, _ARRIVE, number))
      else:
        self.arrive(replica)

  def join(self, replica: int) -> None:
    incarnation = self.replicas[replica].incarnation
    self.write("join", replica=replica, incarnation=incarnation)
    self.tell(quorum.Join(replica, incarnation))
    if self.failures is not None:
      after = self.rng.exponential(1 / self.failures.rate)
      heapq.heappush(self.heap, (self.now + after, replica, _FAIL, 0))

  def fail(self, replica: int) -> None:
    assert self.failures is not None
    if self.failures.takeovers and replica == self.leader:
      self.deaf = self.now + self.rng.choice(self.failures.takeovers)
      self.leader = (replica + 1) % len(self.replicas)
    after = 0.0
    if self.failures.unnoticed:
      after = self.rng.choice(self.failures.unnoticed)
    if after <= 0:
      self.notice(replica)
      return
    one = self.replicas[replica]
    one.silent = True
    one.begun += 1
    heapq.heappush(self.heap, (self.now + after, replica, _NOTICE, 0))

  def notice(self, replica: int) -> None:
    assert self.failures is not None
    one = self.replicas[replica]
    one.silent = False
    if one.computing:
      self.spend(replica, "lost")
    self.write("lost", replica=replica, incarnation=one.incarnation)
    kind = quorum.Leave if self.failures.lowers else quorum.Lost
    self.tell(kind(replica))
    one.since = self.now
    down = self.failures.downtimes
    back = self.now + (down[0] if len(down) == 1 else self.rng.choice(down))
    if back < math.inf:
      heapq.heappush(self.heap, (back, replica, _RETURN, 0))

  def arrive(self, replica: int) -> None:
    one = self.replicas[replica]
    self.tell(quorum.Arrive(replica, one.local_step, count=one.count))

  def tell(self, event: quorum.Event) -> None:
    """Lets the rules decide on an event, and applies their decisions."""
    before = self.state.step
    self.state, decisions = quorum.step(self.state, event)
    for decision in decisions:
      match decision:
        case quorum.Accept(int(replica)):
          self.spend(replica, "held")
        case quorum.Commit():
          self.commit(decision)
        case quorum.Drop():
          self.drop(decision)
        case quorum.Token(int(replica), step, count):
          self.begin(replica, step, count)
    if self.strategy.cancel and self.state.step > before:
      oldest = self.state.step - self.strategy.max_staleness
      for replica, one in enumerate(self.replicas):
        if one.computing and one.local_step < oldest:
          self.arrive(replica)

  def begin(self, replica: int, step: int, count: int) -> None:
    one = self.replicas[replica]
    if one.held:  # It was asked for more gradients for the same step.
      one.held["waiting"] += self.now - one.since
    one.computing, one.local_step, one.count = True, step, count
    one.begun += 1
    one.token, one.start = self.now, max(self.now, self.ready)
    this = np.array([replica])
    seconds = sum(float(self.draws.take(this)[0]) for _ in range(count))
    at = one.start + seconds
    if not one.silent:
      heapq.heappush(self.heap, (at, replica, _ARRIVE, one.begun))

  def spend(self, replica: int, cause: str) -> None:
    """Books the time since its token for a cause; ends the computation."""
    one = self.replicas[replica]
    one.computing, one.since = False, self.now
    books = one.held if cause == "held" else defaultdict[str, float](float)
    cause = "useful" if cause == "held" else cause
    books["communication"] += min(one.start, self.now) - one.token
    books[cause] += max(self.now - one.start, 0.0)
    if books is not one.held:
      self.book(replica, books)

  def book(self, replica: int, books: dict[str, float]) -> None:
    for cause, seconds in books.items():
      self.seconds[cause][replica] += seconds
    books.clear()

  def drop(self, drop: quorum.Drop) -> None:
    assert isinstance(drop.replica, int)
    one = self.replicas[drop.replica]
    self.write(
      "drop",
      **self.gradient(drop.replica, drop.local_step, drop.count),
      reason=drop.reason.value,
    )
    if drop.reason is quorum.Reason.LOST:
      self.lost[drop.replica] += drop.count
      self.seconds["lost"][drop.replica] += (
        sum(one.held.values()) + self.now - one.since
      )
      one.held.clear()
    else:
      self.dropped[drop.replica] += drop.count
      self.spend(drop.replica, "stale")

  def commit(self, commit: quorum.Commit) -> None:
    self.commit_times.append(self.now)
    self.ready = self.now + self.communication
    members = []
    for member in commit.members:
      assert isinstance(member.replica, int)
      one = self.replicas[member.replica]
      self.applied[member.replica] += member.count
      self.staleness[member.staleness] += member.count
      one.held["waiting"] += self.now - one.since
      self.book(member.replica, one.held)
      if self.journal is not None:
        gradient = self.gradient(
          member.replica, member.local_step, member.count
        )
        late = {"staleness": member.staleness, "weight": member.weight}
        members.append(gradient | late)
    self.write(
      "commit",
      step=commit.step,
      attempt=commit.attempt,
      attempt_time=self.now,
      members=members,
    )

  def gradient(self, replica: int, local_step: int, count: int) -> dict:
    """The journal's fields for a gradient."""
    one = self.replicas[replica]
    arrived = self.now if one.computing else one.since
    # The time of an aborted computation does not tell how long it would have
    # taken.
    called_off = one.computing and self.strategy.cancel
    return {
      "replica": replica,
      "incarnation": one.incarnation,
      "local_step": local_step,
      "count": count,
      "batches": None,
      "compute": None if called_off else arrived - one.start,
      "arrived": arrived,
    }

  def write(self, kind: str, **fields: Any) -> None:
    if self.journal is not None:
      fields = {"time": self.now, "step": self.state.step} | fields
      self.journal.write(kind, **fields)


def run(
  strategy: Strategy,
  draws: Draws,
  replicas: int,
  steps: int,
  *,
  seconds: float = math.inf,
  communication: float = 0.0,
  failures: Failures | None = None,
  seed: int = 0,
  journal: Writer | None = None,
  progress: Callable[[int], None] = lambda steps: None,
) -> timing.Timing:
  """Simulates until a number of steps is committed.

  Args:
    strategy: what the replicas do.
    draws: the computation times.
    replicas: number of replicas.
    steps: number of steps to simulate.
    seconds: time to stop if that comes first, but not before the first step.
    communication: seconds from a commit until its parameters are available.
    failures: when replicas fail and come back; None for never.
    seed: seed of the failures.
    journal: receives every event, in virtual time; None for none.
    progress: called from time to time with the steps so far.

  Returns:
    The outcome; with fewer steps if too many replicas are lost to continue.

  Raises:
    ValueError: no step is ever taken.
  """
  engine = _Engine(
    strategy,
    draws,
    replicas,
    communication,
    failures,
    np.random.default_rng([seed, 1]),
    journal,
  )
  engine.write(
    "run",
    strategy=_STRATEGIES[strategy.kind],
    replicas_to_aggregate=strategy.replicas_to_aggregate,
    total_num_replicas=replicas,
    max_staleness=strategy.max_staleness,
    config={"simulated": strategy._asdict(), "seed": seed},
  )
  for replica in range(replicas):
    engine.join(replica)
  reported = 0
  while len(engine.commit_times) < steps and (
    engine.heap and (engine.heap[0][0] <= seconds or not engine.commit_times)
  ):
    engine.next_event()
    if len(engine.commit_times) - reported >= 256:
      reported = len(engine.commit_times)
      progress(reported)
  if not engine.commit_times:
    raise ValueError(
      "no step is ever taken: too many replicas are lost and do not come back."
    )
  most = max(engine.staleness)
  return timing.make(
    strategy,
    np.array(engine.commit_times),
    engine.applied,
    engine.dropped,
    engine.seconds,
    np.array([engine.staleness[late] for late in range(most + 1)]),
    engine.lost,
  )
