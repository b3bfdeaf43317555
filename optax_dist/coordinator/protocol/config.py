"""A run's configuration: what follows from its job, and which replica this is."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Sequence

from optax_dist import quorum
from optax_dist.coordinator.protocol import deadlines
from optax_dist.coordinator.protocol.entries import (
  Job,
  Part,
  Process,
  ReplicaId,
  Rules,
  Start,
)
from optax_dist.coordinator.protocol.policies.leases import LeaseManager
from optax_dist.coordinator.protocol.policies.policy import Policy
from optax_dist.ledger import NOTHING_DONE, Progress, Spans, tree

#: The mean of inline gradients, from their parts and bytes; pure.
Average = Callable[[Sequence[Part], Sequence[bytes]], bytes]

# Upper limit, in bytes, of the batch labels of all gradients of a step.
_MOST_TEXT = 512 << 10


@dataclasses.dataclass(frozen=True)
class Config:
  """A run's job, and what follows from it.

  Attributes:
    job: what all replicas have in common.
    average: for the coordinator, the mean of inline gradients.
    policy: creates, from `timeout`, a policy that keeps steps open and weighs
      gradients; None if a step closes by itself.
    check_inline: raises a ValueError if inline gradients of the job can't be averaged;
      called when the first of them arrives, since the check takes a while.
  """

  job: Job
  average: Average | None = None
  policy: Callable[[float], Policy] | None = None
  check_inline: Callable[[], None] | None = None

  @property
  def rules(self) -> Rules:
    """The numbers of the run."""
    return self.job.rules

  def check(self) -> None:
    """Refuses numbers that make no run: they come from other processes, unchecked.

    Raises:
      ValueError: the message says why.
    """
    rules = self.rules
    times = ("timeout", "transfer_timeout", "silence_timeout", "stall_warning")
    for name in times:
      seconds = getattr(rules, name)
      if seconds is not None and not 0 < seconds <= deadlines.LONGEST:
        raise ValueError(f"{name} is {seconds} s")
    try:
      # As the journal's writer reads it.
      about = json.loads(self.job.about)
    except (ValueError, RecursionError) as error:
      raise ValueError(f"about is no JSON object ({error})") from None
    if not isinstance(about, dict):
      raise ValueError(f"about is no JSON object, but {about!r:.100}")
    self.quorum_state(0)
    self.make_policy(NOTHING_DONE)

  @functools.cached_property
  def wrong_inline(self) -> str:
    """Why inline gradients can't be averaged; "" if they can."""
    try:
      if self.check_inline is not None:
        self.check_inline()
    except ValueError as error:
      return f"a gradient of a job that has none ({error})"
    return ""

  @property
  def inline(self) -> bool:
    """Whether gradients and means are sent inline in messages."""
    return self.rules.inline_bytes is not None

  @property
  def deterministic(self) -> bool:
    """Whether a step is always the same micro-batches."""
    data = self.job.data
    return data is not None and data.deterministic

  @property
  def audits(self) -> bool:
    """Whether some micro-batches are computed by two replicas."""
    data = self.job.data
    return data is not None and data.audit > 0

  @functools.cached_property
  def deadlines(self) -> deadlines.Deadlines:
    """The deadlines that follow from the rules' timeouts."""
    rules = self.rules
    return deadlines.of(
      rules.timeout, rules.transfer_timeout, rules.silence_timeout
    )

  @property
  def needs_all(self) -> bool:
    """Whether each step of all members has one gradient of each, in order."""
    rules = self.rules
    return not (
      self.inline
      or rules.alone
      or self.deterministic  # Only the coordinator knows which member has which slots.
      or self.policy is not None  # It sets the weights when a step closes.
      or rules.replicas_to_aggregate > rules.total_num_replicas
    )

  def most_text(self, gradients: int) -> int:
    """Upper limit, in bytes, of the batch labels of a submission of `gradients`."""
    k, n = self.rules.replicas_to_aggregate, self.rules.total_num_replicas
    return 2 + min(gradients, k) * (most_text(k, n) + 1)

  def inline_size(self, data: Spans) -> int:
    """The bytes of an inline gradient on these samples; 0 if not sent inline."""
    whole = self.rules.inline_bytes or 0
    if not self.deterministic:
      return whole
    assert self.job.data is not None
    return whole * len(tree.nodes_at(self.job.data, data))

  def quorum_state(self, step: int) -> quorum.State:
    """The initial state of the quorum."""
    rules = self.rules
    return quorum.init(
      rules.replicas_to_aggregate,
      rules.total_num_replicas,
      max_staleness=rules.max_staleness,
      weight=quorum.inverse_staleness if rules.weight else None,
      lower_on_leave=rules.lower_on_leave or rules.lower_on_loss,
      two_phase=not self.inline,
      exact=self.deterministic,
      window=self.policy is not None or self.audits,
      global_step=step,
    )

  def make_policy(self, progress: Progress) -> Policy:
    """The policy of a coordinator.

    Args:
      progress: the samples in committed steps.
    """
    rules, data = self.rules, self.job.data
    k = rules.replicas_to_aggregate
    if self.policy is not None:
      return self.policy(rules.timeout)
    if data is not None:
      return LeaseManager(data, k, progress, rules.timeout)
    return Policy(sums=k > rules.total_num_replicas)


def most_text(replicas_to_aggregate: int, total_num_replicas: int) -> int:
  """Upper limit, in bytes, of the batch labels of one gradient, as JSON.

  The labels of all gradients of a step have to fit into one record and one message.
  """
  return _MOST_TEXT // max(replicas_to_aggregate, total_num_replicas)


@dataclasses.dataclass(frozen=True)
class Me:
  """Which replica a client is, and where it finds its coordinator.

  Attributes:
    process: name of this process, new whenever a process starts.
    replica: the replica's id.
    address: address of its transport.
    start: the state that it starts with.
    coordinator: name of the coordinator's process.
    coordinator_address: address of its transport.
    wants_inner: whether a replica that joins a running run takes over the state of
      another replica's own optimizer.
    follows: earlier memberships of its program (`messages.Hello`).
  """

  process: Process
  replica: ReplicaId
  address: str
  start: Start
  coordinator: Process = "coordinator"
  coordinator_address: str = ""
  wants_inner: bool = False
  follows: tuple[tuple[str, int], ...] = ()
