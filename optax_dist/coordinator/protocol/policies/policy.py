"""A coordinator's decisions beside the quorum's rules; this base decides little.

The coordinator calls its policy for each event of a gradient's life:

    claim  a member has called, with the samples that it computes on
    check_gradient -> accepted -> weigh -> committed, or dropped
    request -> announcements: what members should compute next

Other policies decide more: `leases` decides which member computes on which samples,
and an optional policy (`Config.policy`) may keep a step open, and weigh gradients. A
policy finds what it needs of the past in the log (`Committed`), or members send it
again to each new coordinator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated, NamedTuple

import msgspec

from optax_dist import quorum
from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.protocol.entries import Incarnation, Leased, Part
from optax_dist.coordinator.protocol.messages import SubmitGradient
from optax_dist.coordinator.protocol.policies.audit import Verdict
from optax_dist.ledger import Spans


class Share(codec.Struct):
  """A member's report on a round of local steps that it joined midway.

  Attributes:
    share: the fraction of the round's own steps that the member has taken.
  """

  share: Annotated[float, msgspec.Meta(ge=1e-9, le=1)]


#: `SubmitGradient.work` of a contribution with fewer local steps than others.
SHARE: codec.Codec[Share] = codec.Codec(Share)


class Request(NamedTuple):
  """A member should compute so many gradients next, on these samples."""

  incarnation: Incarnation
  gradients: int
  lease: Spans = ()


class GradientCheck(NamedTuple):
  """The policy's check of a submission.

  Attributes:
    refusal: why the submission is invalid; "" if it is valid.
    finite: whether its gradient counts as finite.
    fits: whether it may be accepted.
  """

  refusal: str
  finite: bool
  fits: bool = True


class Next(NamedTuple):
  """The policy's part of a commit, as fields of `Committed`."""

  leases: tuple[Leased, ...] = ()
  skipped: Spans = ()


class Policy:
  """The policy of replicas with their own data; a gradient begins each step.

  Attributes:
    now: the time of the coordinator's clock.
    deadline: until when the coordinator must call `begins`, `closes` and
      `announcements` again.
    exhausted: whether the remaining samples no longer fill a step.
  """

  now: float = -math.inf
  deadline: float = math.inf
  exhausted: bool = False

  def __init__(self, sums: bool = False):
    """Starts with no requests.

    Args:
      sums: whether replicas sum several gradients, so that the coordinator has to
        request how many.
    """
    self._sums = sums
    self._requests: list[Request] = []

  def members_changed(self, state: quorum.State, to_come: int) -> None:
    """A replica has joined or left, or is no longer expected.

    Args:
      state: state of the quorum's rules.
      to_come: how many replicas may come, even if the quorum does not need them.
    """

  def claim(self, incarnation: Incarnation, lease: Spans, count: int) -> None:
    """A member has called this coordinator; the rules want `count` gradients of it."""
    if count:
      self.request(incarnation, count)

  def removed(self, incarnation: Incarnation) -> None:
    """A member was removed."""

  def check_gradient(
    self, incarnation: Incarnation, message: SubmitGradient
  ) -> GradientCheck:
    """A member has submitted a gradient: whether it is valid."""
    refusal = ""
    try:
      if message.work:
        SHARE.decode(message.work)
    except codec.BadMessage as error:
      refusal = f"a share of a round that is none ({error})"
    return GradientCheck(refusal, message.finite)

  def is_blocked(self, incarnation: Incarnation) -> bool:
    """Whether a member gets no samples, since its gradients are not finite."""
    return False

  def accepted(self, incarnation: Incarnation, message: SubmitGradient) -> bool:
    """A gradient was accepted; returns whether to send `Call` to all others."""
    return False

  def has_begun(self, step: int) -> bool:
    """Whether the accepted gradients of a step wait for others."""
    return True

  def dropped(
    self,
    incarnation: Incarnation,
    message: SubmitGradient,
    arriving: bool,
    requested: int | None,
    reason: str,
  ) -> Spans:
    """A gradient was dropped.

    Args:
      incarnation: its member.
      message: the gradient.
      arriving: whether it has just arrived; otherwise it was accepted before.
      reason: why, a value of `quorum.Reason`.
      requested: how many gradients are requested from its member with the answer.

    Returns:
      The samples that the member computes on next.
    """
    return ()

  def swap(self) -> Incarnation | None:
    """The member whose accepted gradient should be returned (`ledger.swap`)."""
    return None

  def lost_samples(self, most: int | None) -> str:
    """Why the run may not end well although all data is used; "" if it may.

    Args:
      most: how many samples may be skipped; None for the default.
    """
    return ""

  def weigh(
    self, parts: tuple[Part, ...], messages: Sequence[SubmitGradient]
  ) -> tuple[Part, ...]:
    """The parts of a mean with their weights; here, by their shares of local steps."""
    if not any(message.work for message in messages):
      return parts
    shares = [
      SHARE.decode(message.work).share if message.work else 1.0
      for message in messages
    ]
    # So that the weights have mean 1.
    scale = len(shares) / sum(shares)
    return tuple(
      codec.replace(part, weight=part.weight * share * scale)
      for part, share in zip(parts, shares, strict=True)
    )

  def committed(
    self,
    parts: tuple[Part, ...],
    tokens: dict[Incarnation, int],
    seconds: float,
  ) -> Next:
    """A step is committed.

    Args:
      parts: the gradients of the step.
      tokens: number of gradients that members should compute next.
      seconds: how long the aggregation took.

    Returns:
      The policy's fields of the commit.
    """
    return Next()

  def begins(self, state: quorum.State, first: float) -> bool:
    """Whether a step begins now that no gradient has begun.

    Args:
      state: state of the quorum's rules.
      first: when the first accepted gradient came; infinity for none.
    """
    return False

  def closes(self, state: quorum.State, first: float, all_in: bool) -> bool:
    """Whether the step takes no more gradients: its window is over.

    Args:
      state: see `begins`.
      first: when the first accepted gradient came, or the step began if none had.
      all_in: whether all members have a gradient accepted.
    """
    return False

  def verdict(self) -> Verdict | None:
    """The audit's verdict on gradients that differ; None if there is none."""
    return None

  def request(self, incarnation: Incarnation, count: int) -> None:
    """A member gets a token: it should compute so many gradients."""
    if self._sums:
      self._requests.append(Request(incarnation, count))

  def announcements(self) -> list[Request]:
    """The requests that no other message has told the members."""
    requests, self._requests = self._requests, []
    return requests
