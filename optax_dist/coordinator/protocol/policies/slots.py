"""The slots of a deterministic step: who computes them, and which count as zeros."""

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
    to: the member.
    slots: their samples.
    owner: the member that need not compute them any more; None if it goes on.
  """

  to: Incarnation
  slots: Spans
  owner: Incarnation | None = None


class Slots:
  """What each member computes in the current step, and what it has found.

  Attributes:
    live: how many members there are.
    sharing: what each was told to compute.
  """

  def __init__(
    self, data: ledger.Batches, step: int, unit: int, assumed_seconds: float
  ):
    """Starts without members.

    Args:
      data: says which slots are audited.
      step: the next step.
      unit: samples in a slot.
      assumed_seconds: see `Sharing`.
    """
    self.live = 1
    self._unit = unit
    self.sharing = Sharing(unit, assumed_seconds)
    self._audit = Audit(data, step) if data.audit else None
    # The slots of this step that count as zeros, as each member has found.
    self._zeros: dict[Incarnation, Spans] = {}

  def removed(self, incarnation: Incarnation) -> None:
    """A member is gone."""
    self.sharing.removed(incarnation)
    if self._audit is not None:
      self._audit.removed(incarnation)

  def share(self, state: ledger.State) -> int:
    """How many slots a member gets that asks amid a step.

    All that are idle share what is free; who gets too much is relieved of it.
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
    """When `move` may find something."""
    idle = [i for i in self._waiting(state) if not ledger.is_blocked(state, i)]
    theft = self._theft(state, idle, now)
    return math.inf if theft is None else theft.time

  def move(self, state: ledger.State, now: float) -> Move | None:
    """What an idle member computes that another one computes, too, or has computed."""
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
    """A slot that nobody computes, though it is leased; empty for none.

    Its member leaves it out, for another one had it, which has gone or got others.
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
    """Whether it is of use that one member computes what another one does."""
    lease, held = self.sharing.lease(owner), state.held.get(owner)
    if held is not None and sp.overlap(lease, held.out):
      return True
    # It is computed again, for an audit.
    return self._audit is not None and self._audit.wants(lease, thief)

  # What they have found.

  def admit(
    self, incarnation: Incarnation, message: SubmitGradient, now: float
  ) -> str:
    """A member has submitted slots; returns what is wrong with that, if it is."""
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
    # It may have computed them before, and others besides.
    before = sp.minus(self._zeros.get(incarnation, ()), data)
    self._zeros[incarnation] = sp.union(before, zeros)
    if self._audit is None:
      return ""
    return self._audit.arrived(incarnation, data, sent)

  def zeros_in(self, incarnation: Incarnation, spans: Spans) -> Spans:
    """The slots of a gradient of which its member says that they are zeros."""
    zeros = self._zeros.get(incarnation, ())
    return sp.common(zeros, sp.union(spans)) if zeros else ()

  def skipped(self, parts: tuple[Part, ...]) -> Spans:
    """The samples that a step names because their gradients were not finite."""
    zeros = ((self._zeros.get(p.incarnation, ()), p.data) for p in parts)
    return sp.union(*(sp.common(spans, data) for spans, data in zeros))

  def is_audited(self, state: ledger.State) -> bool:
    """Whether no slot has to be computed again; others may be compiling yet."""
    if self._audit is None:
      return False
    able = {i for i in _members(state) if not ledger.is_blocked(state, i)}
    return self.sharing.measured < 2 or self._audit.is_settled(able)

  def verdict(self, state: ledger.State) -> Verdict | None:
    """What was found where members' gradients differ; None if none do."""
    return None if self._audit is None else self._audit.verdict(_members(state))


def _members(state: ledger.State) -> set[Incarnation]:
  return {holder for holder in state.replicas if isinstance(holder, int)}
