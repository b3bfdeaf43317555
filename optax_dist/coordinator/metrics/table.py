"""The table of all numbers that a running job reports."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from typing import Literal, NamedTuple, TypeAlias

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


# The values of a number, by the values of its labels, in their order.
Cells: TypeAlias = Mapping[tuple[str, ...], "float | Distribution"]
# All values, by name.
Values: TypeAlias = Mapping[str, Cells]


class Number(NamedTuple):
  """A row of the table.

  Attributes:
    name: in Prometheus' style, without `PREFIX`; for a counter, without
      `_total`. If it has a unit, that is the last word.
    kind: a counter never decreases, except to 0 when its run restarts.
    help: a sentence that describes it.
    labels: what distinguishes its values.
  """

  name: str
  kind: Literal["counter", "gauge", "histogram"]
  help: str
  labels: tuple[str, ...] = ()


TABLE = (
  Number("step", "gauge", "Committed steps of the model."),
  Number("steps", "counter", "Steps committed in this run."),
  Number("step_seconds", "histogram", "From one commit to the next."),
  Number(
    "staleness", "histogram", "Steps by which applied gradients were late."
  ),
  Number("gradients_applied", "counter", "Gradients in committed steps."),
  Number(
    "gradients_dropped",
    "counter",
    "Gradients that did not count, by reason.",
    ("reason",),
  ),
  Number(
    "samples_skipped",
    "counter",
    "Samples that were given up because their gradients were not finite.",
  ),
  Number(
    "moved_bytes",
    "counter",
    "Bytes of gradients, means and states, over all replicas.",
    ("direction",),
  ),
  Number("stalls", "counter", "Steps that took longer than stall_warning."),
  Number(
    "stalled_seconds",
    "gauge",
    "How long the present step has stalled; 0 if it goes on.",
  ),
  Number(
    "attempts_abandoned", "counter", "Aggregation rounds that were abandoned."
  ),
  Number("members", "gauge", "Replicas that take part."),
  Number(
    "membership_changes",
    "counter",
    "Replicas that joined, left, or were lost.",
    ("change",),
  ),
  Number(
    "leader_changes", "counter", "How often another replica became leader."
  ),
  Number(
    "replica_seconds",
    "counter",
    "Where the time of all replicas went; docs/observability.md.",
    ("category",),
  ),
  Number(
    "goodput_ratio",
    "gauge",
    "The share of all replica-seconds that was useful.",
  ),
)


def rows(values: Values) -> Iterator[tuple[Number, Cells]]:
  """The rows that have values, with these, in the order of the table.

  Example:
    >>> [(row.kind, found) for row, found in rows({"members": {(): 3}})]
    [('gauge', {(): 3})]
  """
  for row in TABLE:
    if row.name in values:
      yield row, values[row.name]


def only(value: float | Distribution) -> Cells:
  """The only value of a number without labels."""
  return {(): value}


def by_label(values: Mapping[str, float]) -> Cells:
  """The values of a number with one label."""
  return {(str(label),): value for label, value in values.items()}
