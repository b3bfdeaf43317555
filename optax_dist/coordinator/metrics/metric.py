"""Metrics, independent of the exporter."""

from __future__ import annotations

import bisect
from collections.abc import Mapping
from typing import Literal, NamedTuple

PREFIX = "optax_dist_"


class Distribution:
  """Counts values by size, like a Prometheus histogram.

  Attributes:
    bounds: the upper bounds of the buckets; one more is above the last.
    counts: values in each bucket, not cumulative.
    total: the sum of all values.

  Example:
    >>> found = Distribution((1.0, 2.0))
    >>> for value in (0.5, 1.0, 1.5, 7.0):
    ...   found.add(value)
    >>> found.counts, found.total, found.count
    ([2, 1, 1], 10.0, 4)
  """

  __slots__ = ("bounds", "counts", "total")

  def __init__(self, bounds: tuple[float, ...]):
    self.bounds = bounds
    self.counts = [0] * (len(bounds) + 1)
    self.total = 0.0

  def add(self, value: float, times: int = 1) -> None:
    """Counts a value, or several equal ones."""
    self.counts[bisect.bisect_left(self.bounds, value)] += times
    self.total += value * times

  @property
  def count(self) -> int:
    """How many values were counted."""
    return sum(self.counts)


class Sample(NamedTuple):
  """A value of a metric.

  Attributes:
    value: a number; for a histogram, its `Distribution`.
    labels: distinguish it from the metric's other values.
  """

  value: float | Distribution
  labels: Mapping[str, str] = {}


class Metric(NamedTuple):
  """A metric and all its values.

  Attributes:
    name: in Prometheus' style, without `PREFIX`; for a counter, without
      `_total`.
    kind: a counter never decreases, except to 0 when its run restarts.
    what: a sentence that describes it.
    samples: its current values.
    unit: such as "seconds"; the suffix of the name.
  """

  name: str
  kind: Literal["counter", "gauge", "histogram"]
  what: str
  samples: tuple[Sample, ...]
  unit: str = ""


def one(
  name: str,
  kind: Literal["counter", "gauge", "histogram"],
  what: str,
  value: float | Distribution,
  unit: str = "",
) -> Metric:
  """Creates a metric with one value."""
  return Metric(name, kind, what, (Sample(value),), unit)


def by_label(
  name: str,
  kind: Literal["counter", "gauge"],
  what: str,
  label: str,
  values: Mapping[str, float],
  unit: str = "",
) -> Metric:
  """Creates a metric with one value per value of a label."""
  samples = tuple(
    Sample(value, {label: str(key)}) for key, value in values.items()
  )
  return Metric(name, kind, what, samples, unit)
