"""The slots of a deterministic step: which member has them, and which are zeros."""

from __future__ import annotations

import math
from typing import NamedTuple

from optax_dist import ledger
from optax_dist.coordinator.protocol.entries import Incarnation, Part
from optax_dist.coordinator.protocol.messages import SubmitGradient
from optax_dist.coordinator.protocol.policies import audit
from optax_dist.coordinator.protocol.policies.audit import Audit, Verdict
from optax_dist.coordinator.protocol.policies.sharing import Sharing, Theft
from optax_dist.ledger import Spans
from optax_dist.ledger import spans as sp


class Move(NamedTuple):
  """Slots that an idle member computes from now on.

  Attributes:
    to: the idle member.
    slots: their samples.
    owner: the member that need not compute them any more; None if both compute them.
  """

  to: Incarnation
  slots: Spans
  owner: Incarnation | None = None


class Slots:
  """The slots that each member computes in the current step, and their results.

  Attributes:
    live: how many members there are.
    sharing: which slots each member is to compute.
  """

  def __init__(
    self, data: ledger.Batches, step: int, unit: int, assumed_seconds: float
  ):
    """Starts without members.

    Args:
      data: the leased samples, of which some slots are audited.
      step: the next step.
      unit: samples in a slot.
      assumed_seconds: see `Sharing`.
    """
    self.live = 1
    self._unit = unit
    self.sharing = Sharing(unit, assumed_seconds)
    self._audit = Audit(data, step) if data.audit else None
    # The slots of this step that each member reports as zeros.
    self._zeros: dict[Incarnation, Spans] = {}

  def removed(self, incarnation: Incarnation) -> None:
    """A member is gone."""
    self.sharing.removed(incarnation)
    if self._audit is not None:
      self._audit.removed(incarnation)

  def share(self, state: ledger.State) -> int:
    """How many slots a member gets if it needs some during a step.

    Idle members share the free slots; others take slots from a member with too many.
    """
    idle = max(1, self.live - len(self.sharing.members))
    return max(1, -(-state.free // (idle * self._unit)))

  def begin(
    self, step: int, requested: dict[Incarnation, int], state: ledger.State
  ) -> dict[Incarnation, int]:
    """Begins a step; returns how many slots each member gets, in order."""
    able = [i for i in requested if not ledger.is_blocked(state, i)]
    shares = dict.fromkeys(requested, 0)
    shares |= self.sharing.share(sorted(able), state.need)
    if self._audit is not None:
      self._audit.begin(step)
    self._zeros.clear()
    return {
      i: shares[i] for i in sorted(shares, key=lambda i: (not shares[i], i))
    }

  def deadline(self, state: ledger.State, now: float) -> float:
    """When `move` may find slots to move."""
    idle = [i for i in self._waiting(state) if not ledger.is_blocked(state, i)]
    theft = self._theft(state, idle, now)
    return math.inf if theft is None else theft.time

  def move(self, state: ledger.State, now: float) -> Move | None:
    """Slots for an idle member: taken from another one, left out, or to be audited."""
    waiting = self._waiting(state)
    blocked = {i for i in waiting if ledger.is_blocked(state, i)}
    idle = [i for i in waiting if i not in blocked]
    if idle and (left_out := self._left_out(state)):
      return Move(idle[0], left_out)
    theft = self._theft(state, idle, now)
    if theft is not None and now >= theft.time:
      owner = theft.owner if theft.is_left else None
      return Move(theft.thief, theft.slots, owner)
    if self._audit is None or not waiting:
      return None
    leases = [*map(self.sharing.lease, self.sharing.members)]
    waiting.sort(key=blocked.__contains__)
    again = self._audit.next(waiting, blocked, leases)
    return None if again is None else Move(*again)

  def _waiting(self, state: ledger.State) -> list[Incarnation]:
    """Members that have nothing to compute in this step."""
    waiting = [holder for holder, _ in state.waiting if isinstance(holder, int)]
    return [i for i in waiting if not self.sharing.lease(i)]

  def _left_out(self, state: ledger.State) -> Spans:
    """A slot that no member computes, though it is leased; empty for none.

    Its owner was told to leave it out, and the member that took it has gone, or got
    other slots.
    """
    out = sp.union(*(held.out for held in state.held.values()))
    computed = map(self.sharing.lease, self.sharing.members)
    rest = sp.minus(out, [span for spans in computed for span in spans])
    return sp.head(rest, self._unit)[0]

  def _theft(
    self, state: ledger.State, idle: list[Incarnation], now: float
  ) -> Theft | None:
    """The next slots that an idle member takes from a slow one, if there are any."""
    sharing, pairs = self.sharing, []
    idle = sharing.by_pace(idle)
    for owner in sharing.members if idle else ():
      able = (i for i in idle if self._may_compute(i, owner, state))
      thief = next(able, None)
      if thief is not None:
        pairs.append((thief, owner))
    return sharing.next(pairs, now) if pairs else None

  def _may_compute(
    self, thief: Incarnation, owner: Incarnation, state: ledger.State
  ) -> bool:
    """Whether it helps if one member computes the slots of another."""
    lease, held = self.sharing.lease(owner), state.held.get(owner)
    if held is not None and sp.overlap(lease, held.out):
      return True
    # Otherwise the owner's slot is a repetition for an audit.
    return self._audit is not None and self._audit.wants(lease, thief)

  # Results of slots.

  def admit(
    self, incarnation: Incarnation, message: SubmitGradient, now: float
  ) -> str:
    """Takes a member's slots; returns what is wrong with the submission, or ""."""
    data, timings = message.data, message.timings
    compiled = 0.0 if timings is None else timings.compiled
    self.sharing.brought(incarnation, data, compiled, now)
    try:
      sent = audit.unpack(message.work)
    except ValueError as error:
      return str(error)
    zeros = [
      (position, position + self._unit)
      for position, digest in sent.items()
      if digest == audit.NOT_FINITE
    ]
    # This result replaces that of the same slots; the member's other slots stay.
    before = sp.minus(self._zeros.get(incarnation, ()), data)
    self._zeros[incarnation] = sp.union(before, zeros)
    if self._audit is None:
      return ""
    return self._audit.arrived(incarnation, data, sent)

  def zeros_in(self, incarnation: Incarnation, spans: Spans) -> Spans:
    """The slots of a gradient that its member reports as zeros."""
    zeros = self._zeros.get(incarnation, ())
    return sp.common(zeros, sp.union(spans)) if zeros else ()

  def skipped(self, parts: tuple[Part, ...]) -> Spans:
    """The samples that a step skips because their gradients were not finite."""
    zeros = ((self._zeros.get(p.incarnation, ()), p.data) for p in parts)
    return sp.union(*(sp.common(spans, data) for spans, data in zeros))

  def is_audited(self, state: ledger.State) -> bool:
    """Whether the audit needs no more digests.

    As long as only one member has submitted slots, the audit does not wait: the others
    may still be compiling.
    """
    if self._audit is None:
      return False
    able = {i for i in _members(state) if not ledger.is_blocked(state, i)}
    return self.sharing.measured < 2 or self._audit.is_settled(able)

  def verdict(self, state: ledger.State) -> Verdict | None:
    """The audit's verdict on gradients that differ; None if there is none."""
    return None if self._audit is None else self._audit.verdict(_members(state))


def _members(state: ledger.State) -> set[Incarnation]:
  return {holder for holder in state.replicas if isinstance(holder, int)}
