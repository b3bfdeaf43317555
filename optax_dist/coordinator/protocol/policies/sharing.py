"""Who computes which slots of a deterministic step.

When a step begins, each member gets a run of slots, as long as it is fast. A member
that is done takes slots from the end of another one's run (work stealing: Blumofe
and Leiserson, Scheduling multithreaded computations by work stealing, JACM 1999).
How far that one is isn't known, but how long its slots took so far is. Slots that it
has probably not begun it is told to leave out; so nothing is computed twice. A slot
that the thief would have sooner, or that is late, is computed a second time, and the
first result counts.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Iterable
from typing import NamedTuple

from optax_dist.coordinator.protocol.entries import Incarnation
from optax_dist.ledger import Spans
from optax_dist.ledger import spans as sp

# How much a new measurement of a pace counts, and how quickly the pace of a member
# without any comes to that of the others: it may be faster by now.
_NEW, _OTHERS = 1 / 4, 1 / 8
# The shortest time, in seconds, that a slot is taken to need.
_MIN_SECONDS = 1e-6


class Theft(NamedTuple):
  """Slots that a member takes from another one.

  Attributes:
    time: when it may.
    end: when the owner would be done, if it were as fast as before.
    thief: the member that gets them.
    owner: the member whose they are.
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
  """What each member was told to compute, and how fast it is."""

  def __init__(self, unit: int, assumed_seconds: float):
    """Starts with no leases.

    Args:
      unit: samples in a slot.
      assumed_seconds: how long a slot is taken to need, until a member has brought
        one.
    """
    self._unit, self._assumed_seconds = unit, assumed_seconds
    self._leases: dict[Incarnation, _Lease] = {}
    # Seconds that a slot of each member takes.
    self._seconds: dict[Incarnation, float] = {}

  @property
  def members(self) -> tuple[Incarnation, ...]:
    """Who is to compute something."""
    return tuple(self._leases)

  @property
  def measured(self) -> int:
    """How many members have brought something; others may be compiling yet."""
    return len(self._seconds)

  def lease(self, incarnation: Incarnation) -> Spans:
    """What a member was told to compute; empty for nothing."""
    lease = self._leases.get(incarnation)
    return () if lease is None else lease.spans

  def assign(self, incarnation: Incarnation, spans: Spans, now: float) -> None:
    """A member is told to compute these slots, and no others."""
    self._leases.pop(incarnation, None)
    if spans:
      self._leases[incarnation] = _Lease(spans, now)

  def leave_out(
    self, incarnation: Incarnation, spans: Spans, now: float
  ) -> bool:
    """A member need not compute these; returns whether it was to compute some."""
    lease = self._leases.get(incarnation)
    if lease is None or not sp.overlap(spans, lease.spans):
      return False
    rest = sp.minus(lease.spans, spans)
    self.assign(incarnation, rest, lease.since)
    if not rest and now - lease.since > self._seconds_of(incarnation):
      # Others were faster; it is at least as slow as this.
      self._measure(incarnation, now - lease.since)
    return True

  def brought(
    self, incarnation: Incarnation, spans: Spans, compiled: float, now: float
  ) -> None:
    """A member has computed slots.

    Args:
      incarnation: the member.
      spans: their samples.
      compiled: seconds of it that programs were compiled.
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
    """Begins a step: how many slots each member gets, so that it ends early."""
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
    """The next slots that a member takes; None for none.

    Args:
      pairs: who may take some of whom: for each member with a lease, the fastest
        idle one, which would have them first.
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
      # Its last slot, which is the one to take, may be computed twice already.
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
    # As many as it would have before the owner has the others.
    number = min(int((end - now) / (mine + theirs)), not_begun, all_ - 1)
    slots = sp.tail(lease.spans, max(1, number) * self._unit)
    # To repeat one of several does not help: they are brought together.
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
