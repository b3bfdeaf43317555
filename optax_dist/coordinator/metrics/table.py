"""The rows of the table of all numbers that a running job reports."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping
from typing import Literal, NamedTuple, TypeAlias

Kind: TypeAlias = Literal["counter", "gauge", "histogram"]


class Distribution:
  """Counts values by size, like a Prometheus histogram.

  Attributes:
    bounds: the upper bounds of the buckets; one more is above the last.
    counts: values in each bucket, not cumulative.
    total: the sum of all values.

  Example:
    >>> sizes = Distribution((1.0, 2.0))
    >>> for value in (0.5, 1.0, 1.5, 7.0):
    ...   sizes.add(value)
    >>> sizes.counts, sizes.total, sizes.count
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


class Number(NamedTuple):
  """A row of the table of all numbers.

  Attributes:
    name: in Prometheus' style, without ``optax_dist_``; for a counter, without
      ``_total``. If it has a unit, that is the last word.
    kind: a counter never decreases, except to 0 when its run restarts.
    help: a sentence that describes it.
    value: its value, or its values by the text of its label.
    label: what distinguishes these; "" if it has one value.
  """

  name: str
  kind: Kind
  help: str
  value: float | Distribution | Mapping[str, float]
  label: str = ""

  def cells(self) -> Iterable[tuple[str, float | Distribution]]:
    """Each value, with the text of its label or "".

    Example:
      >>> list(Number("members", "gauge", "Replicas that take part.", 3).cells())
      [('', 3)]
    """
    if isinstance(self.value, Mapping):
      return self.value.items()
    return [("", self.value)]
