"""The lease manager: samples leased with a coordinator's tokens.

Commits are in the log; leases are not. A coordinator that has started again learns
them from the members (`Hello.lease`), and samples that no member claims return to the
pool. So a lease may be given twice across a restart, but no sample can
count twice: a gradient is only accepted if its samples are leased to its
replica, and are not in an earlier accepted gradient.
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
from optax_dist.coordinator.protocol.policies import audit
from optax_dist.coordinator.protocol.policies.audit import Audit, Verdict
from optax_dist.coordinator.protocol.policies.policy import (
  Next,
  Policy,
  Request,
)
from optax_dist.coordinator.protocol.policies.sharing import Sharing, Theft
from optax_dist.ledger import Spans, progress
from optax_dist.ledger import spans as sp


class LeaseManager(Policy):
  """A ledger, and the leases to announce.

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
    """Starts with no leases: members claim those they know.

    Args:
      data: what is leased.
      replicas_to_aggregate: gradients of a step.
      done: the samples in committed steps.
      timeout: how long a run may make no progress, in seconds.
    """
    super().__init__()
    self.state = ledger.init(data, replicas_to_aggregate, done)
    # Members whose leases are not announced yet, in order.
    self._pending: dict[Incarnation, None] = {}
    self._deterministic = data.deterministic
    self._live = 1
    self._sharing = Sharing(self.state.unit, timeout / 16)
    # The slots of this step that count as zeros, as each member has found.
    self._zeros: dict[Incarnation, Spans] = {}
    # How many gradients of each replica were not finite.
    self._not_finite: collections.Counter[ReplicaId] = collections.Counter()
    self._audit: Audit | None = None
    if data.audit:
      self._audit = Audit(data, done.done // data.global_batch)

  @property
  def exhausted(self) -> bool:  # type: ignore[override]
    return self.state.exhausted

  @property
  def deadline(self) -> float:  # type: ignore[override]
    theft = self._theft()
    return math.inf if theft is None else theft.time

  def _step(self, *events: ledger.Event) -> None:
    self.state, leases = ledger.step(self.state, *events)
    for lease in leases:
      assert isinstance(lease.holder, int)
      self._lend(lease.holder, lease.spans)

  def _lend(self, incarnation: Incarnation, spans: Spans) -> None:
    """A member is to compute these samples, and no others."""
    self._sharing.lend(incarnation, spans, self.now)
    self._pending[incarnation] = None

  def announcements(self) -> list[Request]:
    while (idle := self._idle) and (slot := self._left_out()):
      self._give(idle[0], slot)
    while (theft := self._theft()) is not None and self.now >= theft.time:
      if theft.is_left:
        self._leave_out(theft.owner, theft.slots)
      self._give(theft.thief, theft.slots)
    if self._audit is not None and (idle := self._without_lease):
      leases = [*map(self._sharing.lease, self._sharing.members)]
      blocked = {*filter(self.is_blocked, idle)}
      idle.sort(key=blocked.__contains__)
      for incarnation, slot in self._audit.assign(idle, blocked, leases):
        self._give(incarnation, slot)
    asks = [self._ask_of(incarnation) for incarnation in self._pending]
    self._pending.clear()
    # That there is nothing (more) to compute is news in a deterministic step.
    return [ask for ask in asks if ask.lease or self._deterministic]

  def _give(self, incarnation: Incarnation, spans: Spans) -> None:
    """A member computes what another one computes, too, or has computed."""
    if any(sp.overlap(spans, held.out) for held in self.state.held.values()):
      # Nobody has brought it yet, so this result may be the one that counts.
      self._step(ledger.Copy(incarnation, spans))
    else:
      self._lend(incarnation, spans)

  def _leave_out(self, incarnation: Incarnation, spans: Spans) -> None:
    """A member need not compute these samples any more."""
    if self._sharing.leave_out(incarnation, spans, self.now):
      self._pending[incarnation] = None

  def _ask_of(self, incarnation: Incarnation) -> Request:
    lease = self.lease(incarnation)
    return Request(
      incarnation, max(1, sp.size(lease) // self.state.unit), lease
    )

  def _theft(self) -> Theft | None:
    """The next slots that a member takes from a slow one, if there are any."""
    sharing = self._sharing
    idle = sharing.by_pace(self._idle)
    if not idle:
      return None
    pairs = []
    for owner in sharing.members:
      lease = sharing.lease(owner)
      able = (thief for thief in idle if self._may_compute(thief, owner, lease))
      thief = next(able, None)
      if thief is not None:
        pairs.append((thief, owner))
    return sharing.next(pairs, self.now)

  def _may_compute(
    self, thief: Incarnation, owner: Incarnation, lease: Spans
  ) -> bool:
    """Whether it is of use that one member computes what another one does."""
    if sp.overlap(lease, self._out(owner)):
      return True
    # It is computed again, for an audit.
    return self._audit is not None and self._audit.wants(lease, thief)

  def _left_out(self) -> Spans:
    """A slot that nobody computes, though it is leased; empty for none.

    Its member leaves it out, for another one had it, which has gone or got others.
    """
    out = sp.union(*(held.out for held in self.state.held.values()))
    computed = map(self._sharing.lease, self._sharing.members)
    rest = sp.minus(out, [span for spans in computed for span in spans])
    return sp.head(rest, self.state.unit)[0]

  @property
  def _able(self) -> set[Incarnation]:
    """Members that get samples."""
    return {i for i in self._members if not self.is_blocked(i)}

  @property
  def _members(self) -> set[Incarnation]:
    return {i for i in self.state.replicas if isinstance(i, int)}

  @property
  def _without_lease(self) -> list[Incarnation]:
    """Members that have nothing to compute in this step."""
    waiting = self.state.waiting if self._deterministic else ()
    found = [holder for holder, _ in waiting if isinstance(holder, int)]
    return [i for i in found if not self.lease(i)]

  @property
  def _idle(self) -> list[Incarnation]:
    """Of these, those that get samples."""
    return [i for i in self._without_lease if not self.is_blocked(i)]

  def lease(self, incarnation: Incarnation) -> Spans:
    """The samples that a member is to compute on."""
    if not self._deterministic:
      return self._out(incarnation)
    return self._sharing.lease(incarnation)

  def _out(self, incarnation: Incarnation) -> Spans:
    """The samples that a member may submit a gradient of."""
    found = self.state.held.get(incarnation)
    return found.out if found is not None else ()

  def data(self, incarnation: Incarnation) -> Spans:
    found = self.state.held.get(incarnation)
    return found.inside if found is not None else ()

  def members_changed(self, state: quorum.State, lost: int) -> None:
    self._live = state.live
    live: dict[ledger.Holder, ReplicaId] = {
      member.incarnation: replica
      for replica, member in state.replicas.items()
      if member.live
    }
    self._step(
      ledger.Need(quorum.needed(state)),
      ledger.Members(live, state.awaited + lost),
    )

  def claim(self, incarnation: Incarnation, lease: Spans, count: int) -> None:
    count = self._share(max(1, count))
    self._step(ledger.Claim(incarnation, lease, count))
    if incarnation not in self._pending:
      self._lend(incarnation, self._out(incarnation))

  def ask(self, incarnation: Incarnation, count: int) -> None:
    self._sharing.lend(incarnation, (), self.now)
    self._step(ledger.Ask(incarnation, self._share(count)))

  def _share(self, count: int) -> int:
    """How many gradients a member computes that is asked for so many."""
    if not self._deterministic:
      return count
    # All that are idle share what is free; who gets too much is relieved of it.
    idle = max(1, self._live - len(self._sharing.members))
    return max(1, -(-self.state.free // (idle * self.state.unit)))

  def admit(self, incarnation: Incarnation, message: SubmitGradient) -> str:
    data, timings = message.data, message.timings
    compiled = 0.0 if timings is None else timings.compiled
    self._sharing.brought(incarnation, data, compiled, self.now)
    if not self._deterministic:
      return ""
    try:
      sent = audit.unpack(message.work)
    except ValueError as error:
      return str(error)
    self._zeros[incarnation] = sp.union(
      (position, position + self.state.unit)
      for position, digest in sent.items()
      if digest == audit.NOT_FINITE
    )
    if self._audit is None:
      return ""
    return self._audit.arrived(incarnation, data, sent)

  def closes(self, state: quorum.State, first: float) -> bool:
    has_all = state.accepted_count >= quorum.needed(state) and not state.closed
    audit = self._audit
    # Others may be compiling yet.
    alone = self._sharing.measured < 2
    return (
      audit is not None and has_all and (alone or audit.is_settled(self._able))
    )

  def weigh(
    self, parts: tuple[Part, ...], messages: Sequence[SubmitGradient]
  ) -> tuple[Part, ...]:
    return parts  # All have the samples of whole rounds.

  def verdict(self) -> Verdict | None:
    audit = self._audit
    return None if audit is None else audit.verdict(self._members)

  def is_finite(
    self, incarnation: Incarnation, message: SubmitGradient
  ) -> bool:
    bad = self._zeros_in(incarnation, message)
    if not bad:
      return message.finite
    return ledger.are_bad(self.state, incarnation, bad)

  def is_blocked(self, incarnation: Incarnation) -> bool:
    return ledger.is_blocked(self.state, incarnation)

  def _zeros_in(
    self, incarnation: Incarnation, message: SubmitGradient
  ) -> Spans:
    """The slots of a gradient of which its member says that they are zeros."""
    zeros = self._zeros.get(incarnation, ())
    return sp.common(zeros, sp.union(message.data)) if zeros else ()

  def may_accept(
    self, incarnation: Incarnation, message: SubmitGradient
  ) -> bool:
    if sp.size(message.data) != message.count * self.state.unit:
      return False
    return ledger.fits(self.state, incarnation, message.data)

  def accepted(self, incarnation: Incarnation, message: SubmitGradient) -> bool:
    zeros = self._zeros_in(incarnation, message)
    if zeros:
      self._count(incarnation, sp.size(zeros) // self.state.unit)
    self._step(ledger.Accept(incarnation, message.data, zeros))
    for other in self._sharing.members if self._deterministic else ():
      self._leave_out(other, message.data)
    return False

  def dropped(
    self,
    incarnation: Incarnation,
    message: SubmitGradient,
    arriving: bool,
    asked: int | None,
    reason: str,
  ) -> Spans:
    returned = reason == quorum.Reason.RETURNED
    if returned and not arriving and asked is not None:
      self._sharing.lend(incarnation, (), self.now)
      self._step(ledger.Swap(incarnation))
      self._pending.pop(incarnation, None)
      return self.lease(incarnation)
    spans = message.data if arriving else self.data(incarnation)
    bad = () if message.finite else spans
    if reason == quorum.Reason.NON_FINITE:
      bad = bad or self._zeros_in(incarnation, message)
      zeros = sp.size(bad) // self.state.unit if message.finite else 1
      self._count(incarnation, zeros)
    rest = sp.minus(sp.union(spans), bad)
    if bad:
      self._step(ledger.Drop(incarnation, bad, finite=False))
    if rest:
      # Last: who has some finite ones among them is to be trusted.
      finite = True if returned or bad else None
      self._step(ledger.Drop(incarnation, rest, finite))
    if asked is not None:
      self.ask(incarnation, asked)
    self._pending.pop(incarnation, None)
    return self.lease(incarnation)

  def _count(self, incarnation: Incarnation, gradients: int) -> None:
    replica = self.state.replicas.get(incarnation)
    if replica is not None:
      self._not_finite[replica] += gradients

  def swap(self) -> Incarnation | None:
    found = ledger.swap(self.state)
    return found if isinstance(found, int) else None

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
    self._sharing.removed(incarnation)
    if self._audit is not None:
      self._audit.removed(incarnation)
    self._step(ledger.HolderLost(incarnation))
    self._pending.pop(incarnation, None)

  def committed(
    self,
    parts: tuple[Part, ...],
    tokens: dict[Incarnation, int],
    seconds: float,
  ) -> Next:
    # The next leases are sent with the commit, so they cost no message.
    held = tuple([(part.incarnation, part.data) for part in parts])
    skipped = self._skipped(parts)
    inside = [p.incarnation for p in parts if p.incarnation in tokens]
    order = [*inside, *(i for i in tokens if i not in inside)]
    if self._deterministic:
      able = [i for i in order if not ledger.is_blocked(self.state, i)]
      tokens = dict.fromkeys(order, 0) | self._sharing.share(
        sorted(able), self.state.need
      )
      order = sorted(tokens, key=lambda i: (not tokens[i], i))
    asks = [ledger.Ask(i, max(1, tokens[i])) for i in order]
    if self._audit is not None:
      self._audit.begin(parts[0].local_step + 1)
    self._step(ledger.Commit(held, skipped), *asks)
    # Who has nothing to compute yet must not go on with its old lease.
    leases: dict[Incarnation, Spans] = {p.incarnation: () for p in parts}
    leases |= {i: self.lease(i) for i in self._pending}
    self._pending.clear()
    self._zeros.clear()
    return Next(tuple(map(Leased, leases, leases.values())), skipped)

  def _skipped(self, parts: tuple[Part, ...]) -> Spans:
    """The samples that this step names because their gradients were not finite."""
    if not self._deterministic:
      return self.state.abandoned
    zeros = ((self._zeros.get(p.incarnation, ()), p.data) for p in parts)
    return sp.union(*(sp.common(spans, data) for spans, data in zeros))
