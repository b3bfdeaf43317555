"""Which member computes which slots of a deterministic step.

When a step begins, each member gets a run of slots, and a faster member a longer run. A
member that is done takes slots from the end of another member's run (work stealing:
Blumofe and Leiserson, Scheduling multithreaded computations by work stealing, JACM
1999). The coordinator does not know how far the owner of these slots is, but knows how
long its slots took so far. The owner is told to leave out slots that it has probably
not begun, so these are not computed twice. A single slot that the thief would finish
sooner, or that is late, is computed a second time, and the first result counts.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from optax_dist.coordinator.protocol.entries import Incarnation
from optax_dist.ledger import Spans
from optax_dist.ledger import spans as sp

# The weight of a new measurement of a member's pace. And how quickly the estimate for a
# member without slots returns to the usual pace: the member may be faster by now.
_NEW, _OTHERS = 1 / 4, 1 / 8
# The shortest time, in seconds, that a slot is assumed to take.
_MIN_SECONDS = 1e-6


class Theft(NamedTuple):
  """Slots that one member takes from another.

  Attributes:
    time: when the thief may take them.
    end: when the owner would be done, if it were as fast as before.
    thief: the member that gets the slots.
    owner: the member that was to compute them.
    slots: their samples.
    is_left: whether the owner leaves them out; otherwise both compute them.
  """

  time: float
  end: float
  thief: Incarnation
  owner: Incarnation
  slots: Spans
  is_left: bool


class _Lease(NamedTuple):
  spans: Spans
  since: float


class Sharing:
  """The slots that each member is to compute, and how fast it is."""

  def __init__(self, unit: int, assumed_seconds: float):
    """Starts with no leases.

    Args:
      unit: samples in a slot.
      assumed_seconds: how long a slot is assumed to take, until a member has
        submitted one.
    """
    self._unit, self._assumed_seconds = unit, assumed_seconds
    self._leases: dict[Incarnation, _Lease] = {}
    # Seconds that each member needs for a slot.
    self._seconds: dict[Incarnation, float] = {}

  @property
  def members(self) -> tuple[Incarnation, ...]:
    """The members that have slots to compute."""
    return tuple(self._leases)

  @property
  def measured(self) -> int:
    """How many members have submitted slots; others may still be compiling."""
    return len(self._seconds)

  def lease(self, incarnation: Incarnation) -> Spans:
    """The samples of the slots that a member is to compute; empty for none."""
    lease = self._leases.get(incarnation)
    return () if lease is None else lease.spans

  def assign(self, incarnation: Incarnation, spans: Spans, now: float) -> None:
    """Assigns exactly these slots to a member."""
    self._leases.pop(incarnation, None)
    if spans:
      self._leases[incarnation] = _Lease(spans, now)

  def leave_out(
    self, incarnation: Incarnation, spans: Spans, now: float
  ) -> bool:
    """Takes slots off a member's lease; returns whether any were on it."""
    lease = self._leases.get(incarnation)
    if lease is None or not sp.overlap(spans, lease.spans):
      return False
    rest = sp.minus(lease.spans, spans)
    self.assign(incarnation, rest, lease.since)
    if not rest and now - lease.since > self._seconds_of(incarnation):
      # Other members had all its slots first: it needs at least this long for a slot.
      self._measure(incarnation, now - lease.since)
    return True

  def brought(
    self, incarnation: Incarnation, spans: Spans, compiled: float, now: float
  ) -> None:
    """A member has computed slots.

    Args:
      incarnation: the member.
      spans: their samples.
      compiled: for how many of its seconds it compiled programs.
      now: the time.
    """
    lease = self._leases.get(incarnation)
    if lease is not None and sp.overlap(spans, lease.spans):
      del self._leases[incarnation]
      seconds = now - lease.since - compiled
      self._measure(incarnation, seconds / (sp.size(spans) / self._unit))

  def _measure(self, incarnation: Incarnation, seconds: float) -> None:
    seconds = max(seconds, _MIN_SECONDS)
    before = self._seconds.get(incarnation, seconds)
    self._seconds[incarnation] = before + _NEW * (seconds - before)

  def removed(self, incarnation: Incarnation) -> None:
    """A member is gone."""
    self._leases.pop(incarnation, None)
    self._seconds.pop(incarnation, None)

  def share(
    self, members: Iterable[Incarnation], slots: int
  ) -> dict[Incarnation, int]:
    """Begins a step; returns how many slots each member gets, so that it ends early."""
    self._leases.clear()
    shares = dict.fromkeys(members, 0)
    paces = {i: self._seconds_of(i) for i in shares}
    for _ in range(slots if shares else 0):
      shares[min(shares, key=lambda i: ((shares[i] + 1) * paces[i], i))] += 1
    for incarnation, number in shares.items():
      if not number and incarnation in self._seconds:
        more = _OTHERS * (self._usual - paces[incarnation])
        self._seconds[incarnation] += more
    return shares

  def by_pace(self, members: Iterable[Incarnation]) -> list[Incarnation]:
    """Members in order of their paces, the fastest first."""
    return sorted(
      members, key=lambda member: (self._seconds_of(member), member)
    )

  def next(
    self, pairs: Iterable[tuple[Incarnation, Incarnation]], now: float
  ) -> Theft | None:
    """The next slots that a member takes from another; None for none.

    Args:
      pairs: for each member with a lease, the fastest idle member that may take
        slots from it, and then this member itself.
      now: the time.
    """
    leased = collections.Counter(
      slot
      for lease in self._leases.values()
      for start, stop in lease.spans
      for slot in range(start, stop, self._unit)
    )
    thefts = []
    for thief, owner in pairs:
      lease = self._leases[owner]
      # The owner's last slot would be taken first; skip it if two members have it.
      if leased[lease.spans[-1][1] - self._unit] == 1:
        thefts.append(self._theft(thief, owner, lease, now))
    key = lambda theft: (theft.time, -theft.end, theft.thief, theft.owner)
    return min(thefts, key=key, default=None)

  def _theft(
    self, thief: Incarnation, owner: Incarnation, lease: _Lease, now: float
  ) -> Theft:
    all_ = sp.size(lease.spans) // self._unit
    theirs, mine = self._seconds_of(owner), self._seconds_of(thief)
    end = lease.since + all_ * theirs
    not_begun = int((end - now) / theirs)
    # As many slots as the thief can compute before the owner has computed the rest.
    number = min(int((end - now) / (mine + theirs)), not_begun, all_ - 1)
    slots = sp.tail(lease.spans, max(1, number) * self._unit)
    # Repeating one of several begun slots does not help: their owner submits all of
    # them together.
    helps = now + mine < end and (not_begun > 0 or all_ == 1)
    time = now if helps else end + mine
    return Theft(time, end, thief, owner, slots, all_ > 1)

  @property
  def _usual(self) -> float:
    if not self._seconds:
      return self._assumed_seconds
    return statistics.median_low(self._seconds.values())

  def _seconds_of(self, incarnation: Incarnation) -> float:
    seconds = self._seconds.get(incarnation)
    return self._usual if seconds is None else seconds
