"""Groups that fail and return one by one; the others continue in rounds."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from optax_dist.coordinator.metrics import goodput
from optax_dist.coordinator.metrics.goodput import Goodput
from optax_dist.simulate.scale.arrivals import Arrivals
from optax_dist.simulate.scale.fleet import Fleet

_REPAIRED, _BACK = range(2)


class Round(NamedTuple):
  """How a group spends one round, on average, in seconds.

  Attributes:
    useful, waiting, exchanging, dropped, idle: see `goodput.CATEGORIES`.
  """

  useful: float
  waiting: float = 0.0
  exchanging: float = 0.0
  dropped: float = 0.0
  idle: float = 0.0

  @property
  def seconds(self) -> float:
    """The length of the round."""
    return sum(self)


def of_all(fleet: Fleet, arrivals: Arrivals, groups: int) -> Round:
  """The round of groups of which each waits for all others.

  Args:
    fleet: the fleet.
    arrivals: when a group comes to the exchange.
    groups: how many there are.
  """
  last = arrivals.expected(groups, groups)
  return Round(
    arrivals.mean,
    waiting=max(0.0, last - arrivals.mean),
    exchanging=fleet.exchange(groups),
  )


class Loss(NamedTuple):
  """The cost of a failure.

  Attributes:
    work: the share of a round's work that is lost with the group.
    stall: seconds for which the others stop.
  """

  work: float
  stall: float


def run(
  fleet: Fleet,
  seconds: float,
  rng: np.random.Generator,
  round_of: Callable[[int], Round],
  loss_of: Callable[[int, Round], Loss],
  come_back: float,
) -> Goodput:
  """Simulates failures and returns of single groups.

  Args:
    fleet: the fleet.
    seconds: virtual time.
    rng: draws the failures.
    round_of: the round of n groups.
    loss_of: the cost if one of n groups fails in such a round.
    come_back: seconds from the repair of a group until it takes part.

  Returns:
    Chip-seconds by category.
  """
  now, stall = 0.0, 0.0
  up, down, coming = fleet.groups, 0, 0
  events: list[tuple[float, int]] = []
  spent = dict.fromkeys((*Round._fields, "recovery"), 0.0)
  while now < seconds:
    this = round_of(up) if up else Round(0.0, idle=1.0)
    until = min(seconds, events[0][0] if events else seconds)
    rate = up * fleet.group_failure_rate
    failure = now + (rng.exponential(1 / rate) if rate else np.inf)
    fails = failure < until
    passed = min(failure, until) - now
    stood = min(stall, passed)
    stall -= stood
    spent["waiting"] += up * stood
    worked = up * (passed - stood) / this.seconds
    for name, part in zip(Round._fields, this, strict=True):
      spent[name] += worked * part
    spent["idle"] += down * passed
    spent["recovery"] += coming * passed
    now += passed
    if fails:
      loss = loss_of(up, this)
      lost = min(loss.work * this.useful, spent["useful"])
      spent["useful"] -= lost
      spent["dropped"] += lost
      stall = max(stall, loss.stall)
      up, down = up - 1, down + 1
      heapq.heappush(events, (now + fleet.repair, _REPAIRED))
    elif events and events[0][0] <= now:
      _, what = heapq.heappop(events)
      if what == _REPAIRED:
        down, coming = down - 1, coming + 1
        heapq.heappush(events, (now + come_back, _BACK))
      else:
        coming, up = coming - 1, up + 1
  chips = fleet.chips_per_group
  return goodput.make({name: chips * s for name, s in spent.items()})
