"""The leader's rounds of fragments: when they close, and the weights.

A round of a fragment is a step of the log. The quorum's rules say whether there
are enough contributions, and `decoupled_diloco` how much longer to wait, and
the weight of a contribution. Only the weights are in the log: a new leader
learns the rest from the contributions, which are sent again.
"""

from __future__ import annotations

import math

from optax_dist import quorum
from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.protocol.entries import Incarnation, Part, Work
from optax_dist.decoupled_diloco import rules


class Rounds:
  """The grace window of the open round, and its weights.

  Attributes:
    closes: when the window ends; infinity if there is none.
    begins_by: when the round begins even if no learner's turn has come;
      infinity if no contribution waits for that.
  """

  def __init__(self, config: rules.Config, patience: float):
    """Starts without an open round.

    Args:
      config: the configuration of the rules.
      patience: seconds that contributions before their turn wait at most.
    """
    self._config, self._patience = config, patience
    self.closes = self.begins_by = math.inf
    self._step, self._began = -1, 0.0
    self._merge_seconds = 0.0
    self._step_seconds: dict[Incarnation, float] = {}

  def arrived(self, incarnation: Incarnation, work: Work) -> None:
    """A member has sent a contribution."""
    self._step_seconds[incarnation] = work.step_seconds

  def gone(self, incarnation: Incarnation) -> None:
    """A member was removed."""
    self._step_seconds.pop(incarnation, None)

  def begin(self, step: int, work: Work, now: float) -> bool:
    """Whether this contribution begins the round, so that others are called."""
    if self._step == step or not work.begins:
      return False
    self._step, self._began = step, now
    return True

  def begin_unasked(
    self, state: quorum.State, first: float, all_in: bool, now: float
  ) -> bool:
    """Begins a round whose contributions all came before their turn.

    Their learners can't begin it any more, since each has contributed. So it
    begins once no other learner is left to, or after some time.

    Args:
      state: state of the quorum's rules.
      first: when the first accepted contribution came; infinity for none.
      all_in: whether all members have contributed.
      now: the time.

    Returns:
      Whether it begins now: then the others are called.
    """
    self.begins_by = math.inf
    if self.has_begun(state.step) or not state.gathered or state.finished:
      return False
    if not all_in and now < first + self._patience:
      self.begins_by = first + self._patience
      return False
    self._step, self._began = state.step, now
    return True

  def has_begun(self, step: int) -> bool:
    """Whether the round has begun."""
    return self._step == step

  def look(self, state: quorum.State, first: float, now: float) -> bool:
    """Opens the window once there is a quorum.

    Args:
      state: state of the quorum's rules.
      first: when the first accepted contribution came.
      now: the time.

    Returns:
      Whether the window is over.
    """
    enough = (
      self.has_begun(state.step)
      and state.gathered
      and state.gathered >= quorum.needed(state)
    )
    if state.attempt is not None or state.finished or not enough:
      self.closes = math.inf
      return False
    if self.closes == math.inf:
      self.closes = now + rules.grace_window(
        self._config,
        self._step_seconds.values(),
        now - max(first, self._began),
        self._merge_seconds,
      )
    return now >= self.closes

  def weigh(
    self, parts: tuple[Part, ...], work: list[Work]
  ) -> tuple[Part, ...]:
    """The parts of a merge, with weights whose mean is 1.

    Args:
      parts: parts of the merge.
      work: the content of each.
    """
    shares = rules.shares((w.tokens, w.steps, w.late) for w in work)
    return tuple(
      codec.replace(part, weight=share * len(parts))
      for part, share in zip(parts, shares, strict=True)
    )

  def merged(self, seconds: float) -> None:
    """Records how long a merge took."""
    self._merge_seconds = seconds
