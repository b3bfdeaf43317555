"""What a replica requests of its coordinator, until that has done it."""

from __future__ import annotations

import math

from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.deadlines import Deadlines
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Hyperparams,
  Process,
)

# In the order in which a coordinator is told when it has started again. Of
# fingerprints it is the last one: others may tell theirs of the same step.
_KINDS = (
  msg.Leave,
  msg.Finish,
  msg.Save,
  msg.SetHyperparams,
  msg.Fingerprint,
)


class Requests:
  """The last request of each kind; a coordinator that starts again is told again.

  Attributes:
    leave_by: when the replica leaves without an answer.
    ends: whether it has asked to leave, or to end the run.
  """

  def __init__(self, process: Process, limits: Deadlines):
    """Starts without any.

    Args:
      process: the replica's.
      limits: how long it waits.
    """
    self._process, self._limits = process, limits
    self._last: dict[type, msg.Message] = {}
    # How often it has asked to set hyperparameters.
    self._changes = 0
    self.leave_by, self.ends = math.inf, False

  def __contains__(self, kind: type) -> bool:
    return kind in self._last

  def add(self, message: msg.Message, now: float) -> msg.Message:
    """Keeps a request; returns it."""
    self._last[type(message)] = message
    self.ends |= isinstance(message, msg.Leave | msg.Finish)
    if isinstance(message, msg.Leave):
      limits = self._limits
      wait = limits.silence + 2 * (limits.reconnect + limits.transfer)
      self.leave_by = now + wait
    return message

  def hyperparams(self, values: Hyperparams) -> msg.SetHyperparams:
    """The request to set these, and those that are in no commit yet."""
    old = self._last.get(msg.SetHyperparams)
    if isinstance(old, msg.SetHyperparams):
      values = tuple((dict(old.values) | dict(values)).items())
    self._changes += 1
    return msg.SetHyperparams(values, self._changes)

  def all(self) -> list[msg.Message]:
    """Those that have yet to be done, in order."""
    return [self._last[kind] for kind in _KINDS if kind in self._last]

  def joined(self) -> None:
    """It is a new member, with another state perhaps."""
    self._last.pop(msg.Fingerprint, None)

  def committed(self, commit: Committed) -> None:
    """Forgets what a commit has done."""
    if commit.save:
      self._last.pop(msg.Save, None)
    latest = self._process, self._changes
    if latest in [(c.process, c.number) for c in commit.changes]:
      self._last.pop(msg.SetHyperparams, None)
