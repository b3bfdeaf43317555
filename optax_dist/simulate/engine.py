"""Replicas in virtual time: the quorum's rules decide on every event."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from optax_dist import quorum
from optax_dist._internal import checks
from optax_dist.coordinator.journal import Journal
from optax_dist.coordinator.metrics.run_numbers import RunNumbers
from optax_dist.simulate.latency import Host, Latency, check_latency
from optax_dist.simulate.strategy import Strategy
from optax_dist.simulate.timing import Timing

_ARRIVE, _FAIL, _RETURN, _NOTICE = range(4)
# Drops of gradients that had been accepted before.
_WITHDRAWN = (
  quorum.Reason.LOST,
  quorum.Reason.LEFT,
  quorum.Reason.FINISHED,
  quorum.Reason.SUPERSEDED,
)
# Events without a step, for each replica, after which no step is expected.
_EVENTS_WITHOUT_STEP = 10_000
# Times of a gradient that the simulation has none of.
_NOTHING_ELSE = dict.fromkeys(
  ("compiled", "cpu", "encoded", "waited", "exchanged", "applied"), 0.0
)
# The largest seed that both NumPy and JAX take as one word.
MOST_SEED = 2**63 - 1
# Computing times are drawn in rows of so many.
_ROW = 256


class NoStepError(ValueError):
  """In a simulation no step was taken."""


class Failures(NamedTuple):
  """When replicas fail and come back.

  Attributes:
    rate: failures per second of a running replica.
    downtimes: seconds from the detection of a failure until the replica is back,
      one drawn each time; infinite for never.
    unnoticed: seconds until a failure is detected, one drawn each time; none
      for immediately.
    lowers: whether a loss lowers the number of gradients in a step.
  """

  rate: float
  downtimes: tuple[float, ...]
  unnoticed: tuple[float, ...] = ()
  lowers: bool = False


def _computing_times(
  host: Host, seed: np.random.SeedSequence
) -> Iterator[float]:
  """The seconds of a replica's contributions; equal for equal seeds."""
  rng = np.random.Generator(np.random.SFC64(seed))
  while True:
    yield from host.draw(rng, _ROW).tolist()


class _Replica:
  """The current state of one replica.

  Attributes:
    times: its computing times.
    computing: whether it computes, or waits for the parameters for that.
    start: when it has the parameters for its token, and starts to compute.
    computations: number of computations so far; a planned arrival of an earlier
      one is void.
    silent: whether it has failed, undetected so far.
    arrived: when its last accepted gradient arrived.
    begun: when it began the first of its accepted gradients that are in no step
      yet; None if there are none.
    compute: seconds of computing these.
  """

  def __init__(self, times: Iterator[float]):
    self.times = times
    self.computing, self.start = False, 0.0
    self.silent = False
    self.computations = self.incarnation = 0
    self.local_step, self.count = 0, 1
    self.arrived, self.compute = 0.0, 0.0
    self.begun: float | None = None

  def expects(self, number: int) -> bool:
    """Whether the computation with this number is still in progress."""
    return self.computing and number == self.computations


class _Engine:
  """A simulation in progress."""

  def __init__(
    self,
    strategy: Strategy,
    latency: Latency,
    replicas: int,
    communication: float,
    failures: Failures | None,
    seed: int,
    journal: Journal | None,
  ):
    self.strategy, self.journal = strategy, journal
    self.communication, self.failures = communication, failures
    self.rng = np.random.default_rng([seed, 1])
    of_hosts, *seeds = np.random.SeedSequence(seed).spawn(replicas + 1)
    hosts = latency.hosts(replicas, np.random.default_rng(of_hosts))
    self.replicas = [
      _Replica(_computing_times(host, of_host))
      for host, of_host in zip(hosts, seeds, strict=True)
    ]
    self.state = quorum.init(
      strategy.replicas_to_aggregate,
      replicas,
      max_staleness=strategy.max_staleness,
      two_phase=False,
      lower_on_leave=failures is not None and failures.lowers,
    )
    self.handlers: dict[type, Callable[[Any], None]] = {
      quorum.Accept: self.accept,
      quorum.Commit: self.commit,
      quorum.Drop: self.drop,
      quorum.Token: self.begin,
    }
    # When the newest parameters are available.
    self.now = self.ready = 0.0
    # Each event's time, replica, kind, and the number of the replica's computation.
    self.events: list[tuple[float, int, int, int]] = []
    self.events_without_step = 0
    self.commit_times: list[float] = []
    self.numbers = RunNumbers()
    # Records since the last step. If no other step follows, they are not part of the
    # simulated time.
    self.since_commit: list[dict[str, Any]] = []

  def goes_on(self) -> bool:
    """Whether another step can be expected."""
    most = _EVENTS_WITHOUT_STEP * len(self.replicas)
    possible = self.events and not self.state.finished
    return bool(possible) and self.events_without_step < most

  def next_event(self) -> None:
    """Processes the next event."""
    self.events_without_step += 1
    self.now, number, what, computation = heapq.heappop(self.events)
    if what == _FAIL:
      self.fail(number)
    elif what == _NOTICE:
      self.notice(number)
    elif what == _RETURN:
      self.replicas[number].incarnation += 1
      self.join(number)
    elif self.replicas[number].expects(computation):
      self.arrive(number)

  def join(self, number: int) -> None:
    incarnation = self.replicas[number].incarnation
    self.write("join", replica=number, incarnation=incarnation)
    self.decide(quorum.Join(number, incarnation))
    if self.failures is not None:
      after = self.rng.exponential(1 / self.failures.rate)
      heapq.heappush(self.events, (self.now + after, number, _FAIL, 0))

  def fail(self, number: int) -> None:
    assert self.failures is not None
    after = 0.0
    if self.failures.unnoticed:
      after = self.rng.choice(self.failures.unnoticed)
    if after <= 0:
      self.notice(number)
      return
    replica = self.replicas[number]
    replica.silent = True
    replica.computations += 1
    heapq.heappush(self.events, (self.now + after, number, _NOTICE, 0))

  def notice(self, number: int) -> None:
    assert self.failures is not None
    replica = self.replicas[number]
    replica.silent = replica.computing = False
    self.write("lost", replica=number, incarnation=replica.incarnation)
    kind = quorum.Leave if self.failures.lowers else quorum.Lost
    self.decide(kind(number))
    down = self.failures.downtimes
    back = self.now + (down[0] if len(down) == 1 else self.rng.choice(down))
    if back < math.inf:
      heapq.heappush(self.events, (back, number, _RETURN, 0))

  def arrive(self, number: int) -> None:
    replica = self.replicas[number]
    self.decide(quorum.Arrive(number, replica.local_step, count=replica.count))

  def decide(self, event: quorum.Event) -> None:
    """Lets the rules decide on an event, and applies their decisions."""
    before = self.state.step
    self.state, decisions = quorum.step(self.state, event)
    for decision in decisions:
      handler = self.handlers.get(type(decision))
      if handler is not None:
        handler(decision)
    if self.strategy.cancel and self.state.step > before:
      oldest = self.state.step - self.strategy.max_staleness
      for number, replica in enumerate(self.replicas):
        if replica.computing and replica.local_step < oldest:
          self.arrive(number)

  def begin(self, token: quorum.Token) -> None:
    assert isinstance(token.replica, int)
    replica = self.replicas[token.replica]
    if replica.computing:
      return  # The replica finishes its computation first, and then gets a token.
    replica.computing, replica.count = True, token.count
    replica.local_step = token.step
    replica.computations += 1
    replica.start = max(self.now, self.ready)
    if not replica.silent:
      seconds = sum(next(replica.times) for _ in range(token.count))
      arrival = replica.start + seconds, token.replica, _ARRIVE
      heapq.heappush(self.events, (*arrival, replica.computations))

  def accept(self, accept: quorum.Accept) -> None:
    assert isinstance(accept.replica, int)
    replica = self.replicas[accept.replica]
    replica.computing, replica.arrived = False, self.now
    replica.compute += self.now - replica.start
    if replica.begun is None:
      replica.begun = replica.start

  def drop(self, drop: quorum.Drop) -> None:
    assert isinstance(drop.replica, int)
    lost = drop.reason in (quorum.Reason.LOST, quorum.Reason.LEFT)
    reason = quorum.Reason.LOST if lost else drop.reason
    withdrawn = drop.reason in _WITHDRAWN
    self.write(
      "drop",
      **self.gradient(drop.replica, drop.local_step, drop.count, withdrawn),
      reason=reason.value,
    )

  def commit(self, commit: quorum.Commit) -> None:
    self.commit_times.append(self.now)
    self.events_without_step = 0
    self.ready = self.now + self.communication
    members = []
    for member in commit.members:
      assert isinstance(member.replica, int)
      gradient = self.gradient(
        member.replica, member.local_step, member.count, True
      )
      late = {"staleness": member.staleness, "weight": member.weight}
      members.append(gradient | late)
    self.write(
      "commit",
      step=commit.step,
      round=commit.round,
      members=members,
    )
    self.numbers.update(self.since_commit)
    self.since_commit.clear()

  def gradient(
    self, number: int, local_step: int, count: int, accepted: bool
  ) -> dict[str, Any]:
    """The journal's fields for a gradient that is in a step or dropped."""
    replica = self.replicas[number]
    start, sent = replica.start, self.now
    compute: float | None = sent - start
    if accepted and replica.begun is not None:
      start, sent, compute = replica.begun, replica.arrived, replica.compute
      replica.begun, replica.compute = None, 0.0
    else:
      replica.computing = False
      if self.strategy.cancel:
        # The time of an aborted computation does not tell how long it would
        # have taken.
        compute = None
    return {
      "replica": number,
      "incarnation": replica.incarnation,
      "local_step": local_step,
      "count": count,
      "batches": None,
      "compute": compute,
      "age": self.now - sent,
      "timings": {"total": sent - start} | _NOTHING_ELSE,
    }

  def write(self, kind: str, **fields: Any) -> None:
    fields = {"time": self.now, "step": self.state.step} | fields
    self.since_commit.append({"kind": kind} | fields)
    if self.journal is not None:
      self.journal.write(kind, **fields)


def simulate_timing(
  strategy: Strategy,
  latency: Latency,
  replicas: int,
  *,
  steps: int = 1000,
  seed: int = 0,
  communication: float = 0.0,
  failures: Failures | None = None,
  journal: Journal | None = None,
) -> Timing:
  """Simulates N replicas until a number of steps is committed.

  The rules of `optax_dist.quorum` decide what counts and what is dropped. No
  gradient is computed: only time advances.

  Args:
    strategy: what the replicas do.
    latency: how long a gradient takes on each host.
    replicas: number of replicas.
    steps: number of steps to simulate.
    seed: equal seeds give equal outcomes, bit for bit.
    communication: seconds from a commit until its parameters are available.
    failures: when replicas fail and come back; None for never.
    journal: receives every event, in virtual time; None for none.

  Returns:
    The outcome; `Timing.stopped` if too few replicas were left to continue.

  Raises:
    ValueError: a number is out of range, or no step is ever taken.

  Example:
    >>> from optax_dist import simulate
    >>> timing = simulate_timing(
    ...   simulate.sync_replicas(3), simulate.parse_latency("constant:0.5"), 4)
    >>> timing.steps_per_second, round(timing.dropped_share, 2)
    (2.0, 0.25)
  """
  checks.kind("strategy", strategy, Strategy, "a simulate.Strategy")
  check_latency("latency", latency)
  replicas, steps = (
    checks.count("replicas", replicas),
    checks.count("steps", steps),
  )
  checks.number("communication", communication)
  seed = checks.count("seed", seed, least=0, most=MOST_SEED)
  if failures is not None:
    _check_failures(failures)
  if journal is not None:
    checks.kind("journal", journal, Journal, "a Journal, or None")
  engine = _Engine(
    strategy, latency, replicas, communication, failures, seed, journal
  )
  engine.write(
    "run",
    strategy=strategy.kind,
    replicas_to_aggregate=strategy.replicas_to_aggregate,
    total_num_replicas=replicas,
    max_staleness=strategy.max_staleness,
    config={"simulated": strategy._asdict(), "seed": seed},
  )
  for number in range(replicas):
    engine.join(number)
  while len(engine.commit_times) < steps and engine.goes_on():
    engine.next_event()
  if not engine.commit_times:
    raise NoStepError(
      "no step is ever taken: too few replicas are there at a time to compute"
      f" {strategy.replicas_to_aggregate} gradients."
    )
  return Timing(np.array(engine.commit_times), engine.numbers, steps)


def _check_failures(failures: Failures) -> None:
  checks.kind("failures", failures, Failures, "simulate.Failures, or None")
  checks.rate("rate", failures.rate, positive=True)
  for name in ("downtimes", "unnoticed"):
    times = getattr(failures, name)
    checks.kind(name, times, tuple | list, "a tuple of seconds")
    for time in times:
      checks.number(name, time, infinite=True)
  if not failures.downtimes or not min(failures.downtimes):
    raise ValueError(
      f"`downtimes` must be at least one time above 0, got {failures.downtimes}."
    )
  checks.flag("lowers", failures.lowers)
