"""The connection to the coordinator: when it is called, and its last message."""

from __future__ import annotations

import math
from typing import Literal

from optax_dist.coordinator.protocol.deadlines import Deadlines

# The shortest pause before another call; the pause doubles with each loss. If the last
# loss is so many pauses ago, the pauses start anew.
_SHORTEST_PAUSE = 0.05
_FORGOTTEN_AFTER = 10
# The longest pause while the coordinator is away; short, so that a replica soon finds a
# coordinator that has started again.
_LONGEST_PAUSE = 0.2
# Seconds after which a warning is logged that the coordinator is away.
_WARNED_AFTER = 2.0


class CoordinatorConnection:
  """Whether the coordinator is connected, and when to call it again.

  Attributes:
    status: "lost", "called", or "welcomed".
    call_at: when to call; infinity for not at all.
    answer_by: when an unanswered call times out; infinity if no answer is due.
    warn_at: when to warn that the coordinator is away; infinity for not (again).
    has_warned: whether that warning was logged.
    missing: which replicas the run waits for, as the coordinator said; "" for none.
    trouble: why it is not connected; "" if nothing is known.
    last_message: the time and kind of the coordinator's last message; None for none.
  """

  def __init__(self, limits: Deadlines, address: str):
    """Starts without a connection.

    Args:
      limits: how long it waits.
      address: the coordinator's, as errors show it.
    """
    self._limits, self._address = limits, address
    self.status: Literal["lost", "called", "welcomed"] = "lost"
    self.call_at = self.answer_by = self.warn_at = math.inf
    self._pause, self._lost_at = 0.0, -math.inf
    self.has_warned = False
    self.missing = self.trouble = ""
    self.last_message: tuple[float, str] | None = None

  def call(self, now: float) -> None:
    """The coordinator is called."""
    self.status, self.call_at = "called", math.inf
    self.answer_by = now + self._limits.transfer

  def welcome(self) -> None:
    """The coordinator has admitted the replica, or said that the run is over."""
    self.status = "welcomed"
    self.warn_at, self.has_warned, self.trouble = math.inf, False, ""

  def lost(self, reason: str, now: float, removed: bool) -> None:
    """The connection is lost; the coordinator is called again after a pause.

    Args:
      reason: why.
      now: the time.
      removed: whether the replica was removed from the run. If so, even the first call
        comes after a pause, and pauses get longer: otherwise a replica that can't stay
        a member would interrupt the others again and again.
    """
    self.trouble = reason
    if self.status == "welcomed" and not removed:
      self.warn_at = now + _WARNED_AFTER
    # A coordinator that starts again removes members that don't call in `reconnect`.
    reconnect = self._limits.reconnect
    longest = reconnect if removed else min(reconnect / 8, _LONGEST_PAUSE)
    pause = min(longest, self._pause)
    if now >= self._lost_at + _FORGOTTEN_AFTER * pause:
      pause = _SHORTEST_PAUSE if removed else 0.0
    self._pause = 2 * max(_SHORTEST_PAUSE, pause)
    self.status, self.answer_by, self._lost_at = "lost", math.inf, now
    self.call_at = now + pause

  def close(self) -> None:
    """The coordinator is not called any more."""
    self.call_at = self.answer_by = self.warn_at = math.inf

  def why(self, what: str, now: float) -> str:
    """Why the replica still waits for something, human-readable."""
    away = self.status != "welcomed"
    whose, who = "the coordinator", ""
    if away:
      whose, who = "it", f"the coordinator at {self._address} is not connected"
      if self.trouble:
        who += f" ({self.trouble})"
    last = f"{whose} has not sent a message yet"
    if self.last_message is not None:
      at, message = self.last_message
      whose = "its" if away else f"{whose}'s"
      last = f"{whose} last message came {now - at:.1f} s ago ({message})"
    return "; ".join(filter(None, (what, who, last, self.missing)))
