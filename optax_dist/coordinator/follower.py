"""A replica's thread that reads the log and does what it says.

It applies commits as they come, also while the replica still computes on older
parameters; takes its part in attempts; and takes the role of chief where that
is vacant.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from optax_dist.coordinator import (
  board_log,
  engine,
  errors,
  follower_ahead,
  messages,
)
from optax_dist.coordinator.arrival import Arrival, Fate

__all__ = ["Arrival", "Fate", "Follower"]

_log = logging.getLogger("optax_dist.coordinator")

# How long one read of the log blocks before the thread looks around.
_SLICE = 0.1


class Follower(follower_ahead.FollowerAhead):
  """Reads the log; see the module."""

  def run(self) -> None:
    try:
      self._follow()
    except engine.BoardLost as error:
      if not self._stopped.is_set():
        self.fail(errors.CoordinatorError(f"The board is lost: {error}."))
    except Exception as error:
      self.fail(error)

  def _follow(self) -> None:
    while not self._stopped.is_set() and self.failure is None:
      try:
        entry, payload = self._reader.read(
          self.position, self.view.chief_address, _SLICE, self._is_vacant
        )
      except engine.EngineTimeout:
        self._mind_the_chair()
        continue
      except board_log.Trimmed:
        self._has_all_peers = False
        self._committed = True
        # What became of its gradient, or of its request to join, is not to be
        # found out any more. What it has to know comes with its admission; if
        # it read all that is left, it might never catch up.
        self.position = self.log.end()
        self._rejoin("the log has gone on without it")
        continue
      except messages.BadMessage as error:
        _log.warning("entry %d of the log is ignored: %s", self.position, error)
        self.position += 1
        continue
      self._heard = time.monotonic()
      self._vacant = self._vacant and entry["kind"] != "term"
      self.position += 1
      self.view.update(entry)
      self._committed |= entry["kind"] == "commit"
      handler = getattr(self, f"_on_{entry['kind']}", None)
      if handler is not None:
        handler(entry, payload)

  def _is_vacant(self) -> bool:
    return self._vacant or self._stopped.is_set()

  # News.

  def _on_tick(self, entry: dict[str, Any], payload: bytes) -> None:
    if entry["ack"] and self.admitted and not self.lacking:
      self._told = self.step
      self.tell({"kind": "ack", "applied": self.step})

  def _on_stall(self, entry: dict[str, Any], payload: bytes) -> None:
    with self.changed:
      self.missing = entry["text"]
    _log.warning(
      "step %d has waited %.1f s: %s",
      entry["step"],
      entry["waited"],
      entry["text"],
    )

  def _on_fail(self, entry: dict[str, Any], payload: bytes) -> None:
    kind = (
      errors.Diverged
      if entry["error"] == "Diverged"
      else errors.CoordinatorError
    )
    self.fail(kind(entry["reason"]))

  def _on_save_at(self, entry: dict[str, Any], payload: bytes) -> None:
    with self.changed:
      self.save_at = entry["step"]
      self._wishes.pop("save", None)
      self.changed.notify_all()

  def _on_finish(self, entry: dict[str, Any], payload: bytes) -> None:
    if self.admitted and self.step < entry["step"]:
      self.fail(
        errors.RunFinished(
          f"The run has ended ({entry['reason']}) at step {entry['step']}, and "
          f"replica {self.replica!r} has only those of step {self.step}: its "
          "parameters are not the final ones."
        )
      )
      return
    with self.changed:
      self.finished = entry["reason"]
      self._decide(Fate("finished", self.step))
      self.changed.notify_all()
