"""The configuration of a replica's protocol."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from optax_dist import ledger, quorum
from optax_dist.coordinator.protocol import deadlines
from optax_dist.coordinator.protocol.entries import (
  Lineage,
  Part,
  Process,
  ReplicaId,
)
from optax_dist.coordinator.protocol.policies.leases import LeaseManager
from optax_dist.coordinator.protocol.policies.policy import Policy
from optax_dist.ledger import Spans, tree


def _no_average(parts: Sequence[Part], gradients: Sequence[bytes]) -> bytes:
  raise AssertionError("no gradient is sent inline")


@dataclasses.dataclass(frozen=True)
class Config:
  """The settings of one replica, and those shared by all. Times are in seconds.

  Attributes:
    process: name of this process, new whenever a process starts.
    replica: the replica's id.
    address: address of its transport.
    agreement: what all replicas must agree on, as pairs of a name and a
      readable text, of which the first line is compared.
    step: the step of the state that the replica starts with.
    digest: digest of that state: equal for equal states.
    replicas_to_aggregate: gradients in a step.
    total_num_replicas: replicas expected at the start.
    max_staleness: largest staleness of a gradient, in steps.
    weight: None, or "inverse" for 1 / max(1, staleness).
    lower_on_leave: whether replicas that leave lower the quorum.
    lower_on_loss: whether replicas that are lost also lower it.
    inline_bytes: the size of a gradient, if gradients and means are sent inline
      in messages; None: members exchange them.
    average: the mean of inline gradients, from their parts and bytes; pure.
    alone: whether no two replicas may take part in one step.
    timeout: see `deadlines.of`; likewise the next two.
    attempt_timeout: how long a transfer may make no progress.
    leader_timeout: how long a peer may be silent.
    stall_warning: time to wait before the missing replicas are reported.
    fingerprint_every: steps between comparisons of all replicas; 0 for none.
    block: records of the log that are deleted together; one to two blocks stay.
    data: the data that is leased; None: replicas have their own data.
    progress: the samples in committed steps before the first step.
    max_skipped: samples that may be skipped because gradients on them are not
      finite, before the end of the data is an error; None for those of a step.
    lineage: the runs that the start state comes from.
    policy: makes the policy of a new leader, given `timeout`; a step is then
      open until the policy closes it, and has the policy's weights. None: a
      step closes by itself.
    wants_inner_state: whether a replica that joins later needs a snapshot even if
      the log has all means: it has the state of another's own optimizer, too.
  """

  process: Process
  replica: ReplicaId
  address: str
  agreement: tuple[tuple[str, str], ...] = ()
  step: int = 0
  digest: str = ""
  replicas_to_aggregate: int = 1
  total_num_replicas: int = 1
  max_staleness: int = 0
  weight: str | None = None
  lower_on_leave: bool = True
  lower_on_loss: bool = False
  inline_bytes: int | None = None
  average: Callable[[Sequence[Part], Sequence[bytes]], bytes] = _no_average
  alone: bool = False
  timeout: float = 300.0
  attempt_timeout: float | None = None
  leader_timeout: float | None = None
  stall_warning: float = 10.0
  fingerprint_every: int = 0
  block: int = 128
  data: ledger.Batches | None = None
  progress: ledger.Progress = ledger.NOTHING_DONE
  max_skipped: int | None = None
  lineage: Lineage = ()
  policy: Callable[[float], Policy] | None = None
  wants_inner_state: bool = False

  @property
  def inline(self) -> bool:
    """Whether gradients and means are sent inline in messages."""
    return self.inline_bytes is not None

  @property
  def deterministic(self) -> bool:
    """Whether a step is always the same micro-batches."""
    return self.data is not None and self.data.deterministic

  def inline_size(self, data: Spans) -> int:
    """The bytes of an inline gradient on these samples; 0 if none is inline."""
    whole = self.inline_bytes or 0
    if not self.deterministic:
      return whole
    assert self.data is not None
    return whole * len(tree.nodes_at(self.data, data))

  @property
  def audits(self) -> bool:
    """Whether some micro-batches are computed by two replicas."""
    return self.data is not None and self.data.audit > 0

  @functools.cached_property
  def deadlines(self) -> deadlines.Deadlines:
    """How long everybody waits."""
    return deadlines.of(self.timeout, self.attempt_timeout, self.leader_timeout)

  def quorum_state(self, step: int) -> quorum.State:
    """The initial state of the quorum."""
    return quorum.init(
      self.replicas_to_aggregate,
      self.total_num_replicas,
      max_staleness=self.max_staleness,
      weight=quorum.inverse_staleness if self.weight else None,
      lower_on_leave=self.lower_on_leave or self.lower_on_loss,
      two_phase=not self.inline,
      exact=self.deterministic,
      window=self.policy is not None or self.audits,
      global_step=step,
    )

  def leader_policy(self, progress: ledger.Progress) -> Policy:
    """The policy of a new leader.

    Args:
      progress: the samples in committed steps.
    """
    k = self.replicas_to_aggregate
    if self.policy is not None:
      return self.policy(self.timeout)
    if self.data is not None:
      return LeaseManager(self.data, k, progress, self.timeout)
    return Policy(sums=k > self.total_num_replicas)
