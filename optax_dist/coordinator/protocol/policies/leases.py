"""The lease manager: samples leased with a coordinator's tokens.

Commits are in the log; leases are not. A coordinator that has started again learns
leases from the members (`Hello.lease`), and samples that no member claims return to
the pool. So across a restart a sample may be leased twice, but no sample can count
twice: a gradient is only accepted if its samples are leased to its replica, and are
not in an earlier accepted gradient.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Sequence

from optax_dist import ledger, quorum
from optax_dist.coordinator.protocol.entries import (
  Incarnation,
  Leased,
  Part,
  ReplicaId,
)
from optax_dist.coordinator.protocol.messages import SubmitGradient
from optax_dist.coordinator.protocol.policies.audit import Verdict
from optax_dist.coordinator.protocol.policies.policy import (
  GradientCheck,
  Next,
  Policy,
  Request,
)
from optax_dist.coordinator.protocol.policies.slots import Slots
from optax_dist.ledger import Spans, progress
from optax_dist.ledger import spans as sp


class LeaseManager(Policy):
  """Leases samples by the rules of a ledger, and announces the leases.

  Attributes:
    state: the ledger's state.
  """

  def __init__(
    self,
    data: ledger.Batches,
    replicas_to_aggregate: int,
    done: ledger.Progress,
    timeout: float,
  ):
    """Starts with no leases: members claim the leases that they have.

    Args:
      data: the samples to lease.
      replicas_to_aggregate: gradients of a step.
      done: the samples in committed steps.
      timeout: how long a run may make no progress, in seconds.
    """
    super().__init__()
    self.state = ledger.init(data, replicas_to_aggregate, done)
    # Members whose leases are not announced yet, in order.
    self._pending: dict[Incarnation, None] = {}
    # For errors: how many gradients of each replica were not finite.
    self._not_finite: collections.Counter[ReplicaId] = collections.Counter()
    self._slots: Slots | None = None
    if data.deterministic:
      step = done.done // data.global_batch
      self._slots = Slots(data, step, self.state.unit, timeout / 16)

  @property
  def exhausted(self) -> bool:  # type: ignore[override]
    return self.state.exhausted

  @property
  def deadline(self) -> float:  # type: ignore[override]
    slots = self._slots
    return math.inf if slots is None else slots.deadline(self.state, self.now)

  def _step(self, *events: ledger.Event) -> None:
    self.state, leases = ledger.step(self.state, *events)
    for lease in leases:
      assert isinstance(lease.holder, int)
      self._assign(lease.holder, lease.spans)

  def _assign(self, incarnation: Incarnation, spans: Spans) -> None:
    """A member is to compute these samples, and no others."""
    if self._slots is not None:
      self._slots.sharing.assign(incarnation, spans, self.now)
    self._pending[incarnation] = None

  def announcements(self) -> list[Request]:
    slots = self._slots
    while slots is not None and (move := slots.move(self.state, self.now)):
      if move.owner is not None:
        self._leave_out(move.owner, move.slots)
      self._give(move.to, move.slots)
    unit, leases = self.state.unit, {i: self.lease(i) for i in self._pending}
    requests = [
      Request(incarnation, max(1, sp.size(lease) // unit), lease)
      for incarnation, lease in leases.items()
    ]
    self._pending.clear()
    # In a deterministic step an empty lease matters: the member has to stop computing.
    return [r for r in requests if r.lease or slots is not None]

  def _give(self, incarnation: Incarnation, spans: Spans) -> None:
    """A member computes samples that another member computes or has computed, too."""
    if any(sp.overlap(spans, held.out) for held in self.state.held.values()):
      # No member has submitted these samples yet, so the copy may be the one to count.
      self._step(ledger.Copy(incarnation, spans))
    else:
      self._assign(incarnation, spans)

  def _leave_out(self, incarnation: Incarnation, spans: Spans) -> None:
    """A member need not compute these samples any more."""
    slots = self._slots
    if slots is not None and slots.sharing.leave_out(
      incarnation, spans, self.now
    ):
      self._pending[incarnation] = None

  def lease(self, incarnation: Incarnation) -> Spans:
    """The samples that a member is to compute on."""
    if self._slots is not None:
      return self._slots.sharing.lease(incarnation)
    return self._out(incarnation)

  def _out(self, incarnation: Incarnation) -> Spans:
    """The samples that a member may submit a gradient of."""
    held = self.state.held.get(incarnation)
    return held.out if held is not None else ()

  def _accepted(self, incarnation: Incarnation) -> Spans:
    """The samples of a member's accepted gradients."""
    held = self.state.held.get(incarnation)
    return held.accepted if held is not None else ()

  def members_changed(self, state: quorum.State, to_come: int) -> None:
    if self._slots is not None:
      self._slots.live = state.live
    live: dict[ledger.Holder, ReplicaId] = {
      member.incarnation: replica
      for replica, member in state.replicas.items()
      if member.live
    }
    expected = state.awaited + to_come
    self._step(ledger.Members(live, expected, quorum.needed(state)))

  def claim(self, incarnation: Incarnation, lease: Spans, count: int) -> None:
    count = self._share(max(1, count))
    self._step(ledger.Claim(incarnation, lease, count))
    if incarnation not in self._pending:
      self._assign(incarnation, self._out(incarnation))

  def request(self, incarnation: Incarnation, count: int) -> None:
    if self._slots is not None:
      self._slots.sharing.assign(incarnation, (), self.now)
    self._step(ledger.Ask(incarnation, self._share(count)))

  def _share(self, count: int) -> int:
    """How many gradients a member computes, if `count` are requested from it."""
    return count if self._slots is None else self._slots.share(self.state)

  def check_gradient(
    self, incarnation: Incarnation, message: SubmitGradient
  ) -> GradientCheck:
    if not self.state.can_have(message.data):
      return GradientCheck("a gradient on samples that are none", False)
    refusal = ""
    if self._slots is not None:
      refusal = self._slots.admit(incarnation, message, self.now)
    bad, finite = self._zeros_in(incarnation, message.data), message.finite
    if bad:
      finite = ledger.are_bad(self.state, incarnation, bad)
    fits = sp.size(message.data) == message.count * self.state.unit
    fits = fits and ledger.fits(self.state, incarnation, message.data)
    return GradientCheck(refusal, finite, fits)

  def closes(self, state: quorum.State, first: float, all_in: bool) -> bool:
    has_all = state.accepted_count >= quorum.needed(state) and not state.closed
    slots = self._slots
    return slots is not None and has_all and slots.is_audited(self.state)

  def weigh(
    self, parts: tuple[Part, ...], messages: Sequence[SubmitGradient]
  ) -> tuple[Part, ...]:
    return parts  # A lease is for whole rounds, so no part has a smaller share.

  def verdict(self) -> Verdict | None:
    return None if self._slots is None else self._slots.verdict(self.state)

  def is_blocked(self, incarnation: Incarnation) -> bool:
    return ledger.is_blocked(self.state, incarnation)

  def _zeros_in(self, incarnation: Incarnation, spans: Spans) -> Spans:
    """The slots of a gradient that its member reports as zeros."""
    if self._slots is None:
      return ()
    return self._slots.zeros_in(incarnation, spans)

  def accepted(self, incarnation: Incarnation, message: SubmitGradient) -> bool:
    zeros = self._zeros_in(incarnation, message.data)
    if zeros:
      self._count(incarnation, sp.size(zeros) // self.state.unit)
    self._step(ledger.Accept(incarnation, message.data, zeros))
    for other in () if self._slots is None else self._slots.sharing.members:
      self._leave_out(other, message.data)
    return False

  def dropped(
    self,
    incarnation: Incarnation,
    message: SubmitGradient,
    arriving: bool,
    requested: int | None,
    reason: str,
  ) -> Spans:
    returned = reason == quorum.Reason.RETURNED
    if returned and not arriving and requested is not None:
      self._step(ledger.Swap(incarnation))
      self._pending.pop(incarnation, None)
      return self.lease(incarnation)
    spans = self._accepted(incarnation)
    if arriving:
      # The member's earlier gradients of this step stay accepted.
      spans = sp.minus(message.data, spans)
    # Samples that others hold by now are included: otherwise they would count as
    # finite here, against a member that found the same gradients not finite.
    bad = self._zeros_in(incarnation, spans) if message.finite else spans
    if reason == quorum.Reason.NON_FINITE:
      zeros = sp.size(bad) // self.state.unit if message.finite else 1
      self._count(incarnation, zeros)
    rest = sp.minus(sp.union(spans), bad)
    if bad:
      self._step(ledger.Drop(incarnation, bad, finite=False))
    if rest:
      # Last, since finite gradients among them restore the trust in the member.
      finite = True if returned or bad else None
      self._step(ledger.Drop(incarnation, rest, finite))
    if requested is not None:
      self.request(incarnation, requested)
    self._pending.pop(incarnation, None)
    return self.lease(incarnation)

  def _count(self, incarnation: Incarnation, gradients: int) -> None:
    replica = self.state.replicas.get(incarnation)
    if replica is not None:
      self._not_finite[replica] += gradients

  def swap(self) -> Incarnation | None:
    holder = ledger.swap(self.state)
    return holder if isinstance(holder, int) else None

  def lost_samples(self, most: int | None) -> str:
    state, data = self.state, self.state.data
    skipped = sp.union(state.progress.skipped, state.abandoned)
    count = sp.size(skipped)
    none = state.progress.done == sp.size(state.progress.skipped)
    if most is None:
      most = data.global_batch
    if not count or (count <= most and not none):
      return ""
    what = "no sample is in a step" if none else f"max_skipped is {most}"
    who = ", ".join(
      f"replica {replica} ({times})"
      for replica, times in sorted(self._not_finite.items(), key=str)
    )
    return (
      f"All data is used, but {count} samples were skipped, because gradients on"
      f" them were not finite, and {what}: {progress.described(data, skipped)}."
      f" Gradients that were not finite, by replica: {who or 'unknown'}. Look at"
      " these samples, at the learning rate and at these replicas; max_skipped="
      " allows more."
    )

  def removed(self, incarnation: Incarnation) -> None:
    if self._slots is not None:
      self._slots.removed(incarnation)
    self._step(ledger.HolderLost(incarnation))
    self._pending.pop(incarnation, None)

  def committed(
    self,
    parts: tuple[Part, ...],
    tokens: dict[Incarnation, int],
    seconds: float,
  ) -> Next:
    # The next leases are part of the commit, so they need no message of their own.
    owners = dict.fromkeys(part.incarnation for part in parts)
    held = tuple([(i, self._accepted(i)) for i in owners])
    first = [i for i in owners if i in tokens]
    requested = {i: tokens[i] for i in (*first, *tokens)}
    skipped = self.state.abandoned
    if self._slots is not None:
      skipped = self._slots.skipped(parts)
      requested = self._slots.begin(
        parts[0].local_step + 1, requested, self.state
      )
    requests = [ledger.Ask(i, max(1, count)) for i, count in requested.items()]
    self._step(ledger.Commit(held, skipped), *requests)
    # A member without samples gets an empty lease, so that it drops its old one.
    leases: dict[Incarnation, Spans] = dict.fromkeys(owners, ())
    leases |= {i: self.lease(i) for i in self._pending}
    self._pending.clear()
    return Next(tuple(map(Leased, leases, leases.values())), skipped)
