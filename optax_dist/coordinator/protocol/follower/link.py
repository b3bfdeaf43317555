"""Which leader a replica follows, or has called, and when it calls again."""

from __future__ import annotations

import math

from optax_dist.coordinator.protocol.deadlines import Deadlines
from optax_dist.coordinator.protocol.entries import Process

# The first pause before a replica rejoins, or calls again; it doubles each time.
# After so many times the last one without a rejoin, the next is the first again.
FIRST_PAUSE = 0.05
_FORGOTTEN_AFTER = 10


class Link:
  """The link to the leader: none, called, or followed.

  Attributes:
    leader: the process whose stream of the log is read; "" for none.
    called: the process that was asked for it; "" for none.
    calls: how many calls there were.
    call_at: when to call the leader again to which the connection broke.
  """

  def __init__(self, limits: Deadlines):
    """Starts without a leader."""
    self._limits = limits
    self.leader: Process = ""
    self.called: Process = ""
    self.calls = 0
    self.call_at = self._called_at = math.inf
    # How often it has called who was no leader, since one has welcomed it.
    self._refused = 0
    # How often it has rejoined lately, and when it did so last.
    self._rejoins, self._rejoined_at = 0, 0.0

  def __bool__(self) -> bool:
    return bool(self.leader or self.called)

  def __contains__(self, process: Process) -> bool:
    return process in (self.leader, self.called)

  @property
  def deadline(self) -> float:
    """When to call again, or to give up a call."""
    return min(self.call_at, self._called_at + self._limits.patience)

  def is_unanswered(self, now: float) -> bool:
    """Whether a call has had no answer for too long."""
    return now >= self._called_at + self._limits.patience

  def call(self, process: Process, now: float) -> None:
    """A process is called, and the old leader not followed any more."""
    self.leader, self.called, self._called_at = "", process, now
    self.calls += 1

  def follow(self) -> None:
    """The process that was called has welcomed this one."""
    self.leader, self.called, self._called_at = self.called, "", math.inf
    self._refused = 0

  def lose(self) -> None:
    """There is no leader to talk to."""
    self.leader = self.called = ""
    self._called_at = self.call_at = math.inf

  def pause_refused(self) -> float:
    """How long to wait before calling again who was no leader."""
    pause = _backoff(self._refused, self._limits.pace / 8)
    self._refused += 1
    return pause

  def pause_removed(self, now: float, first: float) -> float:
    """How long to wait before rejoining: longer each time.

    Args:
      now: the time.
      first: the first pause.
    """
    pause = _backoff(self._rejoins, self._limits.pace)
    forgotten = now >= self._rejoined_at + _FORGOTTEN_AFTER * pause
    if forgotten or not self._rejoins:
      self._rejoins, pause = 0, first
    self._rejoins += 1
    self._rejoined_at = now
    return pause


def _backoff(times: int, longest: float) -> float:
  """The pause after so many earlier ones."""
  return min(longest, FIRST_PAUSE * 2.0 ** min(times, 16))
