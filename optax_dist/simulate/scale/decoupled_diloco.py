"""Decoupled DiLoCo: learners train on their own clocks and never wait.

A learner is one group, or a program over several. A failure only stops the
program that the chip belongs to.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from typing import NamedTuple

import numpy as np

from optax_dist.coordinator.metrics import goodput
from optax_dist.coordinator.metrics.goodput import Goodput
from optax_dist.simulate.latency.parse import parse_latency
from optax_dist.simulate.scale import arrivals as order
from optax_dist.simulate.scale import run
from optax_dist.simulate.scale.fleet import Fleet

_REPAIRED, _BACK = range(2)
_YEAR = 365.25 * 86400.0


class Learners(NamedTuple):
  """The results of simulated learners.

  Attributes:
    outcome: how the chips' time was spent.
    uptime: the share of the time in which at least a quorum of learners
      trained.
    interruptions: how often a learner stopped.
  """

  outcome: Goodput
  uptime: float
  interruptions: int


@dataclasses.dataclass(frozen=True)
class _Work:
  """A learner's work without failures.

  Attributes:
    fleet: the fleet of its groups.
    period: steps until every fragment was exchanged once.
    learners: number of learners in the exchange.
    elastic: whether it continues without a failed group.
  """

  fleet: Fleet
  period: int
  learners: int
  elastic: bool

  @functools.cached_property
  def _arrivals(self) -> order.Arrivals:
    return order.arrivals(self.fleet.step)

  @property
  def useful(self) -> float:
    """Seconds of computing in a step."""
    return self._arrivals.mean

  @functools.lru_cache(maxsize=1 << 14)  # noqa: B019
  def shares(self, groups: int) -> dict[str, float]:
    """How the time is split while this many groups train together."""
    mean, last = self.useful, self._arrivals.expected(groups, groups)
    waiting = max(0.0, last - mean) if groups > 1 else 0.0
    step = mean + waiting + self.fleet.exchange(groups)
    # Fragments are exchanged while the next ones are computed.
    beyond = max(0.0, self.fleet.exchange(self.learners) - self.period * step)
    seconds = step + beyond / self.period
    return {
      "useful": mean / seconds,
      "waiting": waiting / seconds,
      "exchanging": (self.fleet.exchange(groups) + beyond / self.period)
      / seconds,
    }


class _Learner:
  """A learner whose groups fail during the simulation.

  Attributes:
    spent: group-seconds by category.
    stood: when it was stopped, from and to.
    interruptions: how often it stopped.
  """

  def __init__(self, work: _Work, groups: int):
    self._work, self._now, self._stands_until = work, 0.0, 0.0
    self._up, self._down, self._coming = groups, 0, 0
    self._out: set[int] = set()
    self._returns: list[tuple[float, int, int]] = []
    self.spent = dict.fromkeys(goodput.CATEGORIES, 0.0)
    self.stood: list[tuple[float, float]] = []
    self.interruptions = 0

  def go_on(self, until: float) -> None:
    """Trains until then; groups may return meanwhile."""
    while self._returns and self._returns[0][0] <= until:
      at, what, group = heapq.heappop(self._returns)
      self._pass(at)
      fleet = self._work.fleet
      if what == _REPAIRED:
        self._down, self._coming = self._down - 1, self._coming + 1
        again = at + fleet.restart + fleet.catch_up
        heapq.heappush(self._returns, (again, _BACK, group))
        continue
      self._coming, self._up = self._coming - 1, self._up + 1
      self._out.discard(group)
      if self._up > 1:
        self._stand(fleet.reshard)
    self._pass(until)

  def fail(self, group: int, share: float) -> None:
    """A group fails now, at that share of a step or a period."""
    if group in self._out:
      return
    work, fleet = self._work, self._work.fleet
    stands = self._now < self._stands_until
    lost = share * work.useful * self._up
    if not work.elastic:
      lost *= work.period
      self._stand(fleet.detect + fleet.repair + fleet.restart + fleet.restore)
    else:
      self._out.add(group)
      self._up, self._down = self._up - 1, self._down + 1
      heapq.heappush(
        self._returns, (self._now + fleet.repair, _REPAIRED, group)
      )
      if self._up:
        self._stand(fleet.detect + fleet.reshard)
      else:  # Work that was not exchanged is lost.
        lost *= work.period
        self.interruptions += not stands
    if not stands:
      lost = min(lost, self.spent["useful"])
      self.spent["useful"] -= lost
      self.spent["dropped"] += lost

  def _stand(self, seconds: float) -> None:
    """Stops; events meanwhile are handled in the same pause."""
    if self._now >= self._stands_until and seconds > 0:
      self._stands_until = self._now + seconds
      self.interruptions += 1

  def _pass(self, until: float) -> None:
    passed = until - self._now
    stood = min(passed, max(0.0, self._stands_until - self._now))
    if not self._up:
      stood = passed
    if stood > 0:
      self.stood.append((self._now, self._now + stood))
    self.spent["idle"] += self._down * passed
    self.spent["recovery"] += self._coming * passed + self._up * stood
    if self._up:
      for category, part in self._work.shares(self._up).items():
        self.spent[category] += self._up * (passed - stood) * part
    self._now = until


def simulate_learners(
  fleet: Fleet,
  learners: int | None = None,
  *,
  period: int = 1,
  quorum: int = 1,
  elastic: bool = True,
  seconds: float | None = None,
  seed: int | np.random.Generator = 0,
) -> Learners:
  """Simulates independent failures of the learners' chips.

  An elastic learner stops until it has detected the failure (`detect`) and
  resharded its state (`reshard`), continues without the group, and stops for
  `reshard` again when the group is back, after `repair`, `restart` and
  `catch_up`. If no group is left, it has lost its work since its last exchange.
  A learner that isn't elastic stops for `detect`, `repair`, `restart` and
  `restore`, and loses as much. Events while a learner is stopped are handled in
  the same pause.

  Args:
    fleet: the fleet, divided evenly among the learners.
    learners: independent programs; None for one per group, and 1 for data
      parallelism over all.
    period: steps until every fragment was exchanged once.
    quorum: learners that must train for fragments to be merged.
    elastic: whether a learner continues without a failed group.
    seconds: virtual time; None for about 2,000 failures.
    seed: seed of the failures.

  Returns:
    The results of the learners.

  Raises:
    ValueError: a number is not positive, the quorum is larger than the number of
      learners, or there are more learners than groups.

  Example:
    >>> found = simulate_learners(paper_fleet(1_200_000), 8, seconds=1e5)
    >>> 0.85 < found.outcome.goodput < 0.91
    True

  References:
    Douillard et al. 2026, `Decoupled DiLoCo for Resilient Distributed Pre-training
    <https://arxiv.org/abs/2604.21428>`_.
  """
  count = fleet.groups if learners is None else learners
  for name, value in (("learners", count), ("period", period)):
    if type(value) is not int or value < 1:
      raise ValueError(f"{name} must be a positive integer, got {value!r}.")
  if count > fleet.groups:
    raise ValueError(
      f"{fleet.groups} groups are too few for {count} learners of at least one."
    )
  if type(quorum) is not int or not 1 <= quorum <= count:
    raise ValueError(
      f"quorum must be from 1 to learners={count}, got {quorum!r}."
    )
  seconds = run.duration(fleet, seconds)
  rng = np.random.default_rng(seed)
  work = _Work(fleet, period, count, elastic)
  rate = fleet.groups * fleet.group_failure_rate
  times = np.sort(rng.uniform(0, seconds, rng.poisson(rate * seconds)))
  which = rng.integers(fleet.groups, size=times.size)
  shares = rng.random(times.size)
  # For each learner, the failures of its groups.
  least, more = divmod(fleet.groups, count)
  sizes = np.full(count, least)
  sizes[:more] += 1
  learner_of = np.searchsorted(np.cumsum(sizes), which, side="right")
  spent = dict.fromkeys(goodput.CATEGORIES, 0.0)
  stood: list[tuple[float, float]] = []
  interruptions = 0
  by_learner = np.argsort(learner_of, kind="stable")
  struck, begins = np.unique(learner_of[by_learner], return_index=True)
  for number, mine in zip(
    struck, np.split(by_learner, begins[1:]), strict=False
  ):
    one = _Learner(work, int(sizes[number]))
    for at, group, share in zip(
      times[mine].tolist(),
      which[mine].tolist(),
      shares[mine].tolist(),
      strict=True,
    ):
      one.go_on(at)
      one.fail(group, share)
    one.go_on(seconds)
    for category in spent:
      spent[category] += one.spent[category]
    stood += one.stood
    interruptions += one.interruptions
  sizes[struck] = 0
  for size, many in zip(*np.unique(sizes, return_counts=True), strict=True):
    if size:  # Learners without any failure.
      for category, part in work.shares(int(size)).items():
        spent[category] += part * float(size * many) * seconds
  chips = fleet.chips_per_group
  return Learners(
    goodput.make({name: chips * spent[name] for name in spent}),
    _uptime(stood, count, quorum, seconds),
    interruptions,
  )


def _uptime(
  stood: list[tuple[float, float]],
  learners: int,
  quorum: int,
  seconds: float,
) -> float:
  """The share of the time in which enough learners are running."""
  if not stood:
    return 1.0
  starts, ends = np.array(stood).T
  at = np.concatenate([starts, ends])
  change = np.repeat([1, -1], starts.size)
  by_time = np.argsort(at, kind="stable")
  standing = np.cumsum(change[by_time])
  until = np.append(at[by_time][1:], seconds)
  down = (until - at[by_time])[learners - standing < quorum].sum()
  return 1.0 - float(down) / seconds


@dataclasses.dataclass(frozen=True)
class _DecoupledDiLoCo:
  period: int
  learners: int | None
  elastic: bool

  @property
  def name(self) -> str:
    apart = "" if self.learners is None else f", {self.learners} learners"
    return f"decoupled DiLoCo, period {self.period}{apart}"

  def __call__(
    self, fleet: Fleet, seconds: float, rng: np.random.Generator
  ) -> Goodput:
    return simulate_learners(
      fleet,
      self.learners,
      period=self.period,
      elastic=self.elastic,
      seconds=seconds,
      seed=rng,
    ).outcome


def decoupled_diloco(
  period: int, learners: int | None = None, *, elastic: bool = True
) -> _DecoupledDiLoCo:
  """Learners exchange fragments while they compute, each on its own clock.

  A learner that fails loses its work since its last exchange, and does not hold
  up the others; see `simulate_learners`.

  Args:
    period: steps until every fragment was exchanged once.
    learners: independent programs, over equally many groups; None for one per
      group.
    elastic: whether a learner continues without a failed group.

  Returns:
    The strategy, for `simulate_fleet`.

  Raises:
    ValueError: a number is not a positive integer.

  Source: Douillard et al., Decoupled DiLoCo for Resilient Distributed
  Pre-training, 2026.

  Example:
    >>> decoupled_diloco(50, 8).name
    'decoupled DiLoCo, period 50, 8 learners'
  """
  given = {"period": period, "learners": 1 if learners is None else learners}
  for name, value in given.items():
    if type(value) is not int or value < 1:
      raise ValueError(f"{name} must be a positive integer, got {value!r}.")
  return _DecoupledDiLoCo(period, learners, elastic)


def paper_fleet(chips: int, *, spare: bool = False) -> Fleet:
  """Chips that are interrupted once a year each, as in the paper's table 1.

  The times are fitted to that table, see docs/decoupled_diloco.md.

  Args:
    chips: approximate number of chips; rounded to a multiple of 256.
    spare: whether a program that can't continue without a group gets another
      one at once, and stops for 68 s; for learners that aren't elastic.

  Returns:
    The fleet. Its steps are short enough that lost steps don't matter.

  Example:
    >>> paper_fleet(1_200_000).groups
    4687
  """
  if not chips >= 256:
    raise ValueError(f"chips must be at least 256, got {chips!r}.")
  fleet = Fleet(
    chips=chips // 256 * 256,
    chips_per_group=256,
    step=parse_latency("constant:0.001"),
    failure_rate=1 / _YEAR,
    repair=3600.0,
    detect=7.0,
    reshard=6.0,
  )
  if spare:
    fleet = dataclasses.replace(fleet, repair=0.0, restart=61.0)
  return fleet
