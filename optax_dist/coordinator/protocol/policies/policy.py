"""What a coordinator decides beside the quorum's rules: here, next to nothing.

The coordinator calls its policy for each event of a gradient's life:

    claim  a member has come, and computes on this
    check_gradient -> accepted -> weigh -> committed, or dropped
    request -> announcements: what members are asked to compute next

Other policies decide more: `leases` says who computes on which samples, and an
optional one (`Config.policy`) may keep a step open, and weigh. What a policy
needs of the past is in the log (`Committed`), or is sent again to each
new coordinator.
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
  """What a member says of a round that it took part in from amid it.

  Attributes:
    share: of the round's own steps, how many it has taken.
  """

  share: Annotated[float, msgspec.Meta(ge=1e-9, le=1)]


#: `SubmitGradient.work`, of what has fewer steps than others.
SHARE: codec.Codec[Share] = codec.Codec(Share)


class Request(NamedTuple):
  """What a member should compute next: so many gradients, on these samples."""

  incarnation: Incarnation
  gradients: int
  lease: Spans = ()


class GradientCheck(NamedTuple):
  """What a submission is worth.

  Attributes:
    refusal: why it is refused as invalid; "" if it isn't.
    finite: whether its gradient counts as finite.
    fits: whether it may be accepted.
  """

  refusal: str
  finite: bool
  fits: bool = True


class Next(NamedTuple):
  """What members compute on after a commit, as fields of `Committed`."""

  leases: tuple[Leased, ...] = ()
  skipped: Spans = ()


class Policy:
  """Each replica has its own data, and a step begins with its first gradient.

  Attributes:
    now: the time of the coordinator's clock.
    deadline: when the coordinator must call `begins`, `closes` and `announcements` at
      the latest.
    exhausted: whether the remaining samples no longer fill a step.
  """

  now: float = -math.inf
  deadline: float = math.inf
  exhausted: bool = False

  def __init__(self, sums: bool = False):
    """Starts with no requests.

    Args:
      sums: whether each replica sums several gradients, and so must be told how
        many.
    """
    self._sums = sums
    self._requests: list[Request] = []

  def members_changed(self, state: quorum.State, to_come: int) -> None:
    """A replica has joined or left, or is no longer expected.

    Args:
      state: state of the quorum's rules.
      to_come: replicas that may come, though the quorum may do without them.
    """

  def claim(self, incarnation: Incarnation, lease: Spans, count: int) -> None:
    """A member has come to this coordinator; it was asked for `count` gradients."""
    if count:
      self.request(incarnation, count)

  def removed(self, incarnation: Incarnation) -> None:
    """A member was removed."""

  def check_gradient(
    self, incarnation: Incarnation, message: SubmitGradient
  ) -> GradientCheck:
    """A member has submitted."""
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
    """A gradient was accepted; returns whether all others are called."""
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
      arriving: whether it was never accepted.
      reason: why, a value of `quorum.Reason`.
      requested: the token that its member gets with the answer, if any.

    Returns:
      The samples that it computes on next.
    """
    return ()

  def swap(self) -> Incarnation | None:
    """Whose accepted gradient should be returned (`ledger.swap`); None: no one's."""
    return None

  def lost_samples(self, most: int | None) -> str:
    """What is wrong with ending now that the data is used; "" for nothing.

    Args:
      most: how many samples may be skipped; None for the default.
    """
    return ""

  def weigh(
    self, parts: tuple[Part, ...], messages: Sequence[SubmitGradient]
  ) -> tuple[Part, ...]:
    """The parts of a mean with their weights: here, by their own steps."""
    if not any(message.work for message in messages):
      return parts
    shares = [
      SHARE.decode(message.work).share if message.work else 1.0
      for message in messages
    ]
    # Their mean is 1.
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
    """A step is committed, which took so long.

    Args:
      parts: the gradients of the step.
      tokens: number of gradients that members should compute next.
      seconds: how long aggregating took.

    Returns:
      What is sent along with the commit.
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
    """What was found where members' gradients differ; None if none do."""
    return None

  def request(self, incarnation: Incarnation, count: int) -> None:
    """A member gets a token: it should compute so many gradients."""
    if self._sums:
      self._requests.append(Request(incarnation, count))

  def announcements(self) -> list[Request]:
    """What is to be sent to members, since nothing else has told them."""
    requests, self._requests = self._requests, []
    return requests
