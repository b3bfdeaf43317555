"""Who computes the slots of a slow member in a deterministic step, and when.

A member that has nothing left to compute takes slots from the end of another
one's lease (work stealing: Blumofe and Leiserson, Scheduling multithreaded
computations by work stealing, JACM 1999). How far that one is isn't known, but
how long its slots took so far is. As long as it has probably not begun its last
slot it is told to leave it out; so nothing is computed twice. A slot that is late
is computed a second time, and the first result counts.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from typing import NamedTuple

from optax_dist.coordinator.protocol.entries import Incarnation
from optax_dist.ledger import Spans
from optax_dist.ledger import spans as sp


class Theft(NamedTuple):
  """A slot that a member takes from another one.

  Attributes:
    time: when it may.
    end: when the owner would be done, if it were as fast as before.
    thief: the member that gets it.
    owner: the member whose it is.
    slot: its samples.
    is_left: whether the owner leaves it out; otherwise both compute it.
  """

  time: float
  end: float
  thief: Incarnation
  owner: Incarnation
  slot: Spans
  is_left: bool


class _Lease(NamedTuple):
  spans: Spans
  since: float


class Stealing:
  """What each member was told to compute, and how fast it is."""

  def __init__(self, unit: int):
    """Starts with no leases.

    Args:
      unit: samples in a slot.
    """
    self._unit = unit
    self._leases: dict[Incarnation, _Lease] = {}
    # Seconds that a slot of each member takes.
    self._paces: dict[Incarnation, float] = {}

  @property
  def members(self) -> tuple[Incarnation, ...]:
    """Who is to compute something."""
    return tuple(self._leases)

  def lease(self, incarnation: Incarnation) -> Spans:
    """What a member was told to compute; empty for nothing."""
    found = self._leases.get(incarnation)
    return () if found is None else found.spans

  def lend(self, incarnation: Incarnation, spans: Spans, now: float) -> None:
    """A member is told to compute these slots, and no others."""
    self._leases.pop(incarnation, None)
    if spans:
      self._leases[incarnation] = _Lease(spans, now)

  def trim(self, incarnation: Incarnation, spans: Spans) -> bool:
    """A member is to compute no others than these; returns whether it had some."""
    found = self._leases.get(incarnation)
    if found is None:
      return False
    rest = sp.minus(found.spans, sp.minus(found.spans, spans))
    self.lend(incarnation, rest, found.since)
    return rest != found.spans

  def accepted(self, incarnation: Incarnation, slots: int, now: float) -> None:
    """A member has computed its lease, so many slots."""
    found = self._leases.pop(incarnation, None)
    if found is not None:
      seconds = (now - found.since) / slots
      before = self._paces.get(incarnation, seconds)
      self._paces[incarnation] = (before + seconds) / 2

  def next_step(self) -> None:
    """All slots of a step are in; nobody computes any for it."""
    self._leases.clear()

  def removed(self, incarnation: Incarnation) -> None:
    """A member is gone."""
    self._leases.pop(incarnation, None)
    self._paces.pop(incarnation, None)

  def next(self, idle: Iterable[Incarnation], now: float) -> Theft | None:
    """The next slot that one of these members takes; None for none."""
    if not self._paces:
      return None  # Programs are being compiled.
    thefts = [
      self._theft(thief, owner, lease, now)
      for thief in idle
      for owner, lease in self._leases.items()
      if owner != thief and not self._is_computed_twice(owner, lease)
    ]
    key = lambda theft: (theft.time, -theft.end, theft.thief, theft.owner)
    return min(thefts, key=key, default=None)

  def _theft(
    self, thief: Incarnation, owner: Incarnation, lease: _Lease, now: float
  ) -> Theft:
    slot = sp.tail(lease.spans, self._unit)
    number = sp.size(lease.spans) // self._unit
    theirs, mine = self._pace(owner), self._pace(thief)
    end = lease.since + number * theirs
    has_begun_last = now >= end - theirs
    time = end + mine
    if number > 1 and not has_begun_last and now + mine < end:
      time = now
    return Theft(time, end, thief, owner, slot, number > 1)

  def _is_computed_twice(self, owner: Incarnation, lease: _Lease) -> bool:
    slot = sp.tail(lease.spans, self._unit)
    others = (o.spans for i, o in self._leases.items() if i != owner)
    return any(sp.overlap(slot, spans) for spans in others)

  def _pace(self, incarnation: Incarnation) -> float:
    usual = statistics.median_low(self._paces.values())
    return self._paces.get(incarnation, usual)
