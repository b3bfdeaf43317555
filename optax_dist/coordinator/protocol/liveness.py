"""Adaptive deadlines for recurring events, from the durations seen so far.

An accrual failure detector (Hayashibara et al., The phi accrual failure
detector, 2004) suspects a peer that is late compared with its past. Akka fits a
normal distribution to past durations, Cassandra an exponential one. Step times follow
neither, so here the deadline is a multiple of the observed 99th percentile. The rule
is pure: its inputs are durations, and it has no clock.
"""

from __future__ import annotations

import collections
import dataclasses
import math

QUANTILE = 0.99

# How many of the latest durations count, and after how many new ones the percentile is
# recomputed.
_LATEST, _REFRESH = 1000, 16


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
  """How a deadline adapts to observed durations. Times are in seconds.

  Attributes:
    floor: the minimum of the deadline.
    first: the minimum before `least` durations were seen: programs are still
      being compiled.
    ceiling: the maximum of the deadline.
    factor: the deadline as a multiple of the 99th percentile.
    least: number of durations needed for an estimate.
  """

  floor: float
  first: float
  ceiling: float
  factor: float = 2.5
  least: int = 20


class Silence:
  """The durations of one source, and the deadline for the next.

  Attributes:
    rule: how the deadline adapts.
    count: number of durations seen.
    quantile: the 99th percentile of the last thousand; 0.0 before the first.

  Example:
    >>> seen = Silence(Rule(floor=1.0, first=60.0, ceiling=600.0))
    >>> seen.deadline
    60.0
    >>> for _ in range(100):
    ...   seen.add(2.0)
    >>> 5.0 <= seen.deadline <= 5.3
    True
  """

  __slots__ = ("_latest", "count", "quantile", "rule")

  def __init__(self, rule: Rule):
    self.rule = rule
    self.count, self.quantile = 0, 0.0
    self._latest: collections.deque[float] = collections.deque(maxlen=_LATEST)

  def add(self, seconds: float) -> None:
    """Adds a duration."""
    latest, least = self._latest, self.rule.least
    latest.append(seconds)
    self.count += 1
    if self.count == 2 * least:
      # The first durations include the compilation of programs.
      for _ in range(least):
        latest.popleft()
    few = self.count < 4 * least
    if few or self.count % _REFRESH == 0 or seconds > self.quantile:
      ordered = sorted(latest)
      self.quantile = ordered[math.ceil(QUANTILE * len(ordered)) - 1]

  @property
  def deadline(self) -> float:
    """How long to wait for the next event, in seconds."""
    rule = self.rule
    least = rule.first if self.count < rule.least else rule.floor
    return min(rule.ceiling, max(least, rule.factor * self.quantile))
