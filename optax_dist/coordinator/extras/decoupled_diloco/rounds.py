"""The coordinator's rounds of fragments: when they close, and the weights.

A round of a fragment is a step of the log. The quorum's rules say whether there
are enough contributions, and `rules` how much longer to wait, and the weight of
a contribution. Only the weights are in the log: a coordinator that has
started again learns the rest from the contributions, which are sent again.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from optax_dist import quorum
from optax_dist.coordinator.extras.decoupled_diloco import rules
from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.protocol.codec import Finite, Natural, Positive
from optax_dist.coordinator.protocol.entries import (
  Fragments,
  Incarnation,
  Part,
)
from optax_dist.coordinator.protocol.messages import SubmitGradient
from optax_dist.coordinator.protocol.policies.policy import (
  GradientCheck,
  Next,
  Policy,
)
from optax_dist.ledger import Spans


class Work(codec.Struct):
  """The content of a learner's contribution to a fragment.

  Attributes:
    tokens: tokens that it was trained on.
    steps: the learner's own steps since the version of the fragment it started
      from.
    step_seconds: how long one of them takes.
    late: rounds of the fragment since that version.
    begins: whether it is the learner's turn, or the learner was called, so that the
      contribution begins the round. Otherwise it waits until the round begins.
  """

  tokens: Natural
  steps: Positive
  step_seconds: Finite
  late: Natural
  begins: bool = True


#: `SubmitGradient.work`, which the protocol passes on to the coordinator's `Rounds`.
WORK: codec.Codec[Work] = codec.Codec(Work)


@dataclasses.dataclass(frozen=True)
class MakeRounds:
  """Makes the policy of a coordinator that has started again; `Config.policy`.

  Attributes:
    config: the configuration of the rules.
  """

  config: Fragments

  def __call__(self, timeout: float) -> Rounds:
    """The policy of a coordinator without an open round.

    Args:
      timeout: the run's, in seconds; contributions before their turn wait for
        half of it at most.
    """
    return Rounds(self.config, timeout / 2)


class Rounds(Policy):
  """The grace window of the open round, and its weights.

  A contribution before the turn of its round waits for no one.
  """

  def __init__(self, config: Fragments, begin_timeout: float):
    """Starts without an open round.

    Args:
      config: the configuration of the rules.
      begin_timeout: seconds that contributions before their turn wait at most.
    """
    super().__init__()
    self._config, self._begin_timeout = config, begin_timeout
    # When the window ends, and when the round begins even if no learner's turn
    # has come.
    self._closes = self._begins_by = math.inf
    self._step, self._began = -1, 0.0
    # The latest step in which a learner's contribution was not finite in its turn.
    self._bad = -1
    self._merge_seconds = 0.0
    # The content of each learner's latest contribution.
    self._work: dict[Incarnation, Work] = {}

  @property
  def deadline(self) -> float:  # type: ignore[override]
    return min(self._closes, self._begins_by)

  def check_gradient(
    self, incarnation: Incarnation, message: SubmitGradient
  ) -> GradientCheck:
    refusal = ""
    try:
      self._work[incarnation] = WORK.decode(message.work)
    except codec.BadMessage as error:
      refusal = f"a contribution without its work ({error})"
    return GradientCheck(refusal, message.finite)

  def removed(self, incarnation: Incarnation) -> None:
    self._work.pop(incarnation, None)

  def accepted(self, incarnation: Incarnation, message: SubmitGradient) -> bool:
    # The first contribution in its turn begins the round.
    step = message.local_step
    if self._step == step or not self._work[incarnation].begins:
      return False
    self._step, self._began = step, self.now
    return True

  def dropped(
    self,
    incarnation: Incarnation,
    message: SubmitGradient,
    arriving: bool,
    requested: int | None,
    reason: str,
  ) -> Spans:
    work = self._work.get(incarnation)
    if reason == quorum.Reason.NON_FINITE and work is not None and work.begins:
      self._bad = message.local_step
    return ()

  def begins(self, state: quorum.State, first: float) -> bool:
    # A learner that contributed before its turn can't begin the round any more. If all
    # contributions came early, the round begins once no other learner is left that
    # could begin it, or after some time.
    self._begins_by = math.inf
    if self.has_begun(state.step) or state.finished:
      return False
    if self._bad == state.step:
      # A contribution that was not finite was due to begin the round; it was dropped,
      # but the other learners are called all the same.
      self._step, self._began = state.step, self.now
      return True
    if not state.accepted_count:
      return False
    if state.working and self.now < first + self._begin_timeout:
      self._begins_by = first + self._begin_timeout
      return False
    self._step, self._began = state.step, self.now
    return True

  def has_begun(self, step: int) -> bool:
    return self._step == step

  def closes(self, state: quorum.State, first: float, all_in: bool) -> bool:
    # The window opens once there is a quorum. Newcomers, for which the quorum doesn't
    # wait, may contribute in the window, too: it delays no learner.
    enough = (
      self.has_begun(state.step)
      and state.accepted_count
      and state.accepted_count >= quorum.needed(state)
    )
    if state.round is not None or state.finished or not enough:
      self._closes = math.inf
      return False
    if self._closes == math.inf:
      self._closes = self.now + rules.grace_window(
        self._config,
        [work.step_seconds for work in self._work.values()],
        self.now - max(first, self._began),
        self._merge_seconds,
      )
    if self.now < self._closes and not all_in:
      return False
    self._closes = math.inf
    return True

  def weigh(
    self, parts: tuple[Part, ...], messages: Sequence[SubmitGradient]
  ) -> tuple[Part, ...]:
    work = [WORK.decode(message.work) for message in messages]
    shares = rules.shares((w.tokens, w.steps, w.late) for w in work)
    # So that the weights have mean 1.
    return tuple(
      codec.replace(part, weight=share * len(parts))
      for part, share in zip(parts, shares, strict=True)
    )

  def committed(
    self,
    parts: tuple[Part, ...],
    tokens: dict[Incarnation, int],
    seconds: float,
  ) -> Next:
    self._merge_seconds = seconds
    return Next()
