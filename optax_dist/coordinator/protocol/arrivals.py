"""Adaptive deadlines for recurring events, from the durations seen so far.

An accrual failure detector (Hayashibara et al., The phi accrual failure
detector, 2004) gives up what is late compared with the past. Akka fits a normal
distribution to it, Cassandra an exponential one; step times are neither, so
here the deadline is a multiple of the observed 99th percentile. A pure rule:
its inputs are durations, and it has no clock.
"""

from __future__ import annotations

import dataclasses
import math

QUANTILE = 0.99

# Durations are counted in bins, each wider than the last by this ratio.
_RATIO, _SHORTEST, _BINS = 1.05, 1e-4, 480
_LOG = math.log(_RATIO)
_EDGES = tuple(_SHORTEST * _RATIO ** (i + 1) for i in range(_BINS))
# Each arrival multiplies the weight of earlier ones by this factor.
_KEPT = 0.999
# The same for the first estimate: programs were compiled at the start.
_KEPT_OF_START = 0.2
# Arrivals after which the percentile is always recomputed.
_REFRESH = 16


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

  Raises:
    ValueError: they are not 0 < floor <= first <= ceiling, factor >= 1 and
      least >= 1.
  """

  floor: float
  first: float
  ceiling: float
  factor: float = 2.5
  least: int = 20

  def __post_init__(self) -> None:
    if not 0 < self.floor <= self.first <= self.ceiling:
      raise ValueError(
        "A Rule needs 0 < floor <= first <= ceiling, got"
        f" {self.floor!r}, {self.first!r} and {self.ceiling!r}."
      )
    if not (self.factor >= 1 and self.least >= 1):
      raise ValueError(
        "A Rule needs factor >= 1 and least >= 1, got"
        f" {self.factor!r} and {self.least!r}."
      )


class Arrivals:
  """The durations of one source, and the deadline for the next.

  Attributes:
    rule: how the deadline adapts.
    count: number of durations seen.
    quantile: their 99th percentile, in which about the last thousand dominate;
      0.0 before the first.

  Example:
    >>> seen = Arrivals(Rule(floor=1.0, first=60.0, ceiling=600.0))
    >>> seen.deadline
    60.0
    >>> for _ in range(100):
    ...   seen.add(2.0)
    >>> 5.0 <= seen.deadline <= 5.3
    True
  """

  __slots__ = (
    "_fresh",
    "_top",
    "_total",
    "_weight",
    "_weights",
    "count",
    "quantile",
    "rule",
  )

  def __init__(self, rule: Rule):
    self.rule = rule
    self.count, self.quantile = 0, 0.0
    self._weights = [0.0] * _BINS
    # The highest bin in use, and the weight of the last arrival.
    self._top, self._weight, self._total = 0, 1.0, 0.0
    self._fresh = 0

  def add(self, seconds: float) -> None:
    """Adds a duration."""
    at = 0
    if seconds > _SHORTEST:
      at = min(int(math.log(seconds / _SHORTEST) / _LOG), _BINS - 1)
    self._weight /= _KEPT
    self._weights[at] += self._weight
    self._total += self._weight
    self._top = max(self._top, at)
    self.count += 1
    self._fresh += 1
    if self._weight > 1e100:
      self._scale(1.0 / self._weight)
    elif self.count == self.rule.least:
      self._scale(_KEPT_OF_START / self._weight)
    few = self.count < 4 * self.rule.least
    if few or self._fresh >= _REFRESH or seconds > self.quantile:
      self._refresh()

  @property
  def deadline(self) -> float:
    """How long to wait for the next one, in seconds."""
    rule = self.rule
    least = rule.first if self.count < rule.least else rule.floor
    return min(rule.ceiling, max(least, rule.factor * self.quantile))

  def _refresh(self) -> None:
    self._fresh = 0
    above, at = 0.0, self._top
    while at:
      above += self._weights[at]
      if above > (1.0 - QUANTILE) * self._total:
        break
      at -= 1
    self.quantile = _EDGES[at]

  def _scale(self, by: float) -> None:
    """Rescales earlier weights, so that the next arrival has weight 1."""
    self._weights = [w * by for w in self._weights]
    self._total *= by
    self._weight = 1.0
