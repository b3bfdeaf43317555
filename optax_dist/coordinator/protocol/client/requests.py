"""A replica's requests to its coordinator, until they are done."""

from __future__ import annotations

import math

from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.deadlines import Deadlines
from optax_dist.coordinator.protocol.entries import (
  Committed,
  Hyperparams,
  Process,
)

# The order in which requests are sent again to a coordinator that has started again. Of
# fingerprints only the last one is: the other replicas send theirs of the same step.
_KINDS = (
  msg.Leave,
  msg.Finish,
  msg.Save,
  msg.SetHyperparams,
  msg.Fingerprint,
)


class Requests:
  """The last request of each kind; a coordinator that starts again gets them again.

  Attributes:
    leave_by: when the replica leaves even without an answer.
    ends: whether the replica has requested to leave, or to end the run.
  """

  def __init__(self, process: Process, limits: Deadlines):
    """Starts without requests.

    Args:
      process: the replica's.
      limits: how long it waits.
    """
    self._process, self._limits = process, limits
    self._last: dict[type, msg.Message] = {}
    # The number of requests to set hyperparameters so far, and the values that are in
    # no commit yet, each with the number of its request.
    self._changes = 0
    self._values: dict[str, tuple[float, int]] = {}
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
    """The request to set these values, and earlier ones that are in no commit yet."""
    self._changes += 1
    self._values |= {name: (value, self._changes) for name, value in values}
    return self._set()

  def _set(self) -> msg.SetHyperparams:
    values = tuple([(name, value) for name, (value, _) in self._values.items()])
    return msg.SetHyperparams(values, self._changes)

  def are_set(self, number: int) -> None:
    """Forgets the values of all requests up to `number`, as they are in the log."""
    self._values = {n: of for n, of in self._values.items() if of[1] > number}
    self._last.pop(msg.SetHyperparams, None)
    if self._values:
      self._last[msg.SetHyperparams] = self._set()

  def all(self) -> list[msg.Message]:
    """The requests that have yet to be done, in order."""
    return [self._last[kind] for kind in _KINDS if kind in self._last]

  def joined(self) -> None:
    """The replica has become a new member; its fingerprint may be of another state."""
    self._last.pop(msg.Fingerprint, None)

  def committed(self, commit: Committed) -> None:
    """Forgets requests that a commit has done."""
    if commit.save:
      self._last.pop(msg.Save, None)
    for change in commit.changes:
      if change.process == self._process:
        self.are_set(change.number)
