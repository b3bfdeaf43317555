"""The connection to the coordinator, and when it is called again."""

from __future__ import annotations

import math
from typing import Literal

from optax_dist.coordinator.protocol.deadlines import Deadlines

# The first pause before another call; it doubles each time. After so many times
# the last one without a loss, the next is the first again.
_FIRST_PAUSE = 0.05
_FORGOTTEN_AFTER = 10
# The longest pause while a coordinator is away: one that has started again is to be
# found soon.
_LONGEST_PAUSE = 0.2
# Seconds after which people are told of a coordinator that is away.
_TOLD_AFTER = 2.0


class CoordinatorConnection:
  """Whether the coordinator is connected, and when to call it again.

  Attributes:
    status: "lost", "called", or "welcomed".
    call_at: when to call; infinity for not at all.
    tell_at: when to tell people that it is away; infinity for not (again).
    told: whether they know.
  """

  def __init__(self, limits: Deadlines):
    """Starts without a connection."""
    self._reconnect = limits.reconnect
    self._transfer = limits.transfer
    self.status: Literal["lost", "called", "welcomed"] = "lost"
    self.call_at = self._called_at = math.inf
    self._losses, self._lost_at = 0, -math.inf
    self.tell_at, self.told = math.inf, False

  @property
  def deadline(self) -> float:
    """When to call, or to give up a call."""
    return min(self.call_at, self._called_at + self._transfer, self.tell_at)

  def is_unanswered(self, now: float) -> bool:
    """Whether a call has had no answer for too long."""
    return now >= self._called_at + self._transfer

  def call(self, now: float) -> None:
    """The coordinator is called."""
    self.status, self._called_at, self.call_at = "called", now, math.inf

  def welcome(self) -> None:
    """It has answered."""
    self.status, self._called_at = "welcomed", math.inf
    self.tell_at, self.told = math.inf, False

  def lose(self, now: float, removed: bool) -> None:
    """The connection is lost; it is called again after a pause.

    Args:
      now: the time.
      removed: whether a membership has ended with it: then the first pause is one,
        or replicas that can't stay would interrupt the others again and again.
    """
    if self.status == "welcomed" and not removed:
      self.tell_at = now + _TOLD_AFTER
    # A coordinator that starts again removes who hasn't called within a pace.
    away = min(self._reconnect / 8, _LONGEST_PAUSE)
    longest = self._reconnect if removed else away
    pause = min(longest, _FIRST_PAUSE * 2.0 ** min(self._losses, 16))
    if now >= self._lost_at + _FORGOTTEN_AFTER * pause or not self._losses:
      self._losses, pause = 0, _FIRST_PAUSE if removed else 0.0
    self._losses += 1
    self._lost_at = now
    self.status, self._called_at, self.call_at = "lost", math.inf, now + pause

  def close(self) -> None:
    """It is not called any more."""
    self.call_at = self._called_at = self.tell_at = math.inf
