"""The leader's side of the ledger: samples leased with its tokens.

Commits are in the log; leases are not. A new leader learns them from the
members (`Hello.lease`), and samples that no member claims return to the pool.
So a lease may be given twice across a change of leaders, but no sample can
count twice: a gradient is only accepted if its samples are leased to its
replica, and are not in an earlier accepted gradient.
"""

from __future__ import annotations

from optax_dist import ledger, quorum
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.entries import Incarnation, Leased, Part
from optax_dist.coordinator.protocol.messages import Arrive
from optax_dist.ledger import Spans
from optax_dist.ledger import spans as sp


class Lender:
  """A ledger, and the leases to announce.

  Attributes:
    state: the ledger's state.
    pending: leases that are not announced yet, by member.
  """

  def __init__(self, config: Config, progress: ledger.Progress):
    assert config.data is not None
    self.state = ledger.init(
      config.data, config.replicas_to_aggregate, progress
    )
    self.pending: dict[Incarnation, Spans] = {}

  @property
  def exhausted(self) -> bool:
    """Whether the remaining samples no longer fill a step."""
    return self.state.exhausted

  def _step(self, *events: ledger.Event) -> None:
    self.state, leases = ledger.step(self.state, *events)
    for lease in leases:
      assert isinstance(lease.holder, int)
      self.pending[lease.holder] = lease.spans

  def take(self, incarnation: Incarnation) -> Spans:
    """The lease to send to this member; empty for none."""
    return self.pending.pop(incarnation, ())

  def take_all(self) -> tuple[Leased, ...]:
    """All leases to announce."""
    leases = tuple(Leased(i, spans) for i, spans in self.pending.items())
    self.pending.clear()
    return leases

  def lease(self, incarnation: Incarnation) -> Spans:
    """The samples that a member computes on."""
    found = self.state.held.get(incarnation)
    return found.out if found is not None else ()

  def data(self, incarnation: Incarnation) -> Spans:
    """The samples of a member's accepted gradient."""
    found = self.state.held.get(incarnation)
    return found.inside if found is not None else ()

  def need(self, state: quorum.State) -> None:
    """The members have changed, and thus how many gradients a step needs."""
    self._step(ledger.Need(quorum.needed(state)))

  def claim(self, incarnation: Incarnation, spans: Spans, count: int) -> None:
    """A member reports the samples that it computes on."""
    self._step(ledger.Claim(incarnation, spans, count))
    if incarnation not in self.pending:
      confirmed = self.lease(incarnation)
      if confirmed:
        self.pending[incarnation] = confirmed

  def ask(self, incarnation: Incarnation, count: int) -> None:
    """A member gets a token."""
    self._step(ledger.Ask(incarnation, count))

  def fits(self, incarnation: Incarnation, message: Arrive) -> bool:
    """Whether a gradient may be accepted."""
    if sp.size(message.data) != message.count * self.state.unit:
      return False
    return ledger.fits(self.state, incarnation, message.data)

  def accept(self, incarnation: Incarnation, spans: Spans) -> None:
    """A gradient was accepted."""
    self._step(ledger.Accept(incarnation, spans))

  def drop(
    self, incarnation: Incarnation, spans: Spans, finite: bool = True
  ) -> None:
    """A gradient was dropped."""
    if spans:
      self._step(ledger.Drop(incarnation, spans, finite))

  def gone(self, incarnation: Incarnation, keep: Spans) -> None:
    """A member was removed; samples that are kept may still be committed."""
    self._step(ledger.Gone(incarnation, keep))
    self.pending.pop(incarnation, None)

  def commit(
    self, parts: tuple[Part, ...], tokens: dict[Incarnation, int]
  ) -> tuple[tuple[Spans, ...], tuple[Leased, ...], Spans]:
    """A step is committed, and these members get a token with it.

    Args:
      parts: the gradients of the step.
      tokens: number of gradients, by member.

    Returns:
      What the members of its parts compute on next, in their order; what other
      members do, where that is to be told; and the samples that are given up.
    """
    held = tuple([(part.incarnation, part.data) for part in parts])
    skipped = self.state.giving_up
    asks = [ledger.Ask(holder, count) for holder, count in tokens.items()]
    self._step(ledger.Commit(held, skipped), *asks)
    leases = tuple([self.take(part.incarnation) for part in parts])
    return leases, self.take_all(), skipped
