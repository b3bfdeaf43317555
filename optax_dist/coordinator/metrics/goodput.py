"""Goodput: the time of all replicas, split into eight categories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

# In the order of tables and plots.
CATEGORIES = {
  "useful": "computing that became part of the model",
  "waiting": "for the other replicas of a step",
  "exchanging": "sending, receiving and applying",
  "dropped": "computing that was stale, dropped, or lost with a replica",
  "compile": "tracing and compiling programs",
  "start": "from the start of the run until a replica first computes",
  "recovery": "what failures cost besides: saving, restarting, catching up",
  "idle": "not there, or with nothing to do",
}


class Goodput(NamedTuple):
  """Replica-seconds (or chip-seconds) by category.

  Attributes:
    seconds: time in each of `CATEGORIES`; they add up to the total.

  Example:
    >>> goodput = make({"useful": 6.0, "waiting": 2.0})
    >>> goodput.total, goodput.goodput
    (8.0, 0.75)
  """

  seconds: dict[str, float]

  @property
  def total(self) -> float:
    """All replica-seconds."""
    return sum(self.seconds.values())

  @property
  def goodput(self) -> float:
    """The share that was useful."""
    return self.share("useful")

  def share(self, category: str) -> float:
    """The share of a category in all seconds; 0 if there are none."""
    total = self.total
    return self.seconds[category] / total if total else 0.0

  def shares(self) -> dict[str, float]:
    """The share of each category; they add up to 1."""
    return {category: self.share(category) for category in CATEGORIES}

  def report(self) -> dict[str, Any]:
    """Everything as plain numbers, for JSON."""
    return {"seconds": dict(self.seconds), "shares": self.shares()}


def make(seconds: Mapping[str, float]) -> Goodput:
  """Creates a goodput, with 0 for missing categories.

  Args:
    seconds: time in some of `CATEGORIES`.

  Returns:
    The time in all of them.

  Raises:
    ValueError: a category is unknown.
  """
  unknown = sorted(set(seconds) - set(CATEGORIES))
  if unknown:
    raise ValueError(
      f"a category is one of {', '.join(CATEGORIES)}; got {', '.join(unknown)}."
    )
  return Goodput({c: float(seconds.get(c, 0.0)) for c in CATEGORIES})
