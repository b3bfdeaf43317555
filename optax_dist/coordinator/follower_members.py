"""Being let in, given up, and caught up by a peer's snapshot."""

from __future__ import annotations

import logging
from typing import Any

from optax_dist.coordinator import (
  engine,
  errors,
  follower_chair,
  messages,
  phases,
)
from optax_dist.coordinator.arrival import Fate
from optax_dist.coordinator.fingerprint import fingerprint

_log = logging.getLogger("optax_dist.coordinator")


class FollowerMembers(follower_chair.FollowerChair):
  """The part of a follower that takes part or not; see the module."""

  def hello(self) -> None:
    """Asks to be let in; under a new incarnation each time."""
    board = self._engine.board
    header = {
      "kind": "hello",
      "replica": self.replica,
      "address": self._engine.exchange.address,
      "spec": self._spec,
      "step": self.step,
      "state": fingerprint(self.shared),
    }
    phases.reach("joining", self.replica)
    number = max(map(_number, board.items("hello")), default=-1) + 1
    while True:
      key = f"hello/{number}"
      blob = messages.pack(self._settings.secret, key, header)
      if board.put(key, blob):
        break
      number += 1
    with self.changed:
      self.incarnation, self.admitted = number, False
    self._claim(0)

  def _on_join(self, entry: dict[str, Any], payload: bytes) -> None:
    if entry["incarnation"] == self.incarnation:
      self._admitted(entry)
    elif self.admitted and entry["peer"] == self.incarnation:
      self._serve(entry["incarnation"])

  def _admitted(self, entry: dict[str, Any]) -> None:
    if entry["peer"] is not None:
      if not self._restore(entry["peer"]):
        return
    elif entry["step"] != self.step:
      raise errors.CoordinatorError(
        f"The job is at step {entry['step']} and this replica at {self.step}, "
        "with nobody to take a snapshot from."
      )
    with self.changed:
      self.admitted, self.asked = True, entry["count"]
      self._arrival = None
      self._told = self.step
      self.changed.notify_all()
    self._meet_chief()

  def _on_refuse(self, entry: dict[str, Any], payload: bytes) -> None:
    if entry["incarnation"] == self.incarnation:
      self.fail(
        errors.JoinRefused(
          f"The job refuses replica {self.replica!r}: {entry['reason']}."
        )
      )

  def _on_gone(self, entry: dict[str, Any], payload: bytes) -> None:
    if entry["incarnation"] != self.incarnation:
      return
    if entry["reason"] == "left":
      with self.changed:
        self.gone = True
        self.changed.notify_all()
      return
    # It was taken for dead (stopped, or cut off), and is not.
    _log.warning(
      "replica %r was given up (%s); it joins again",
      self.replica,
      entry["reason"],
    )
    self._decide(Fate("lost", self.step))
    self.rejoins += 1
    self._pending = None
    self.hello()

  def _serve(self, to: int) -> None:
    peer = self.view.peers.get(to)
    if peer is not None:
      phases.reach("serving", self.replica)
      self._snapshots.serve(
        self.shared, self.step, self.position, to, peer.address
      )

  def _on_serve(self, entry: dict[str, Any], payload: bytes) -> None:
    if entry["peer"] == self.incarnation:
      self._serve(entry["to"])
    elif entry["to"] == self.incarnation:
      self._restore(entry["peer"])

  def _restore(self, peer: int) -> bool:
    """Takes over the state of a peer, as of this position of the log."""
    try:
      found = self.view.peers.get(peer)
      if found is None:
        raise engine.PeerLost("it is gone")
      phases.reach("fetching_snapshot", self.replica)
      shared, step = self._snapshots.fetch(
        self.shared,
        self.position,
        self.incarnation,
        found.address,
        self._settings.attempt_timeout,
        self._stopped.is_set,
      )
    except (
      engine.EngineTimeout,
      engine.PeerLost,
      engine.OfferGone,
      messages.BadMessage,
    ) as error:
      self._ask_for_snapshot(f"the snapshot of {self.view.name(peer)}: {error}")
      return False
    with self.changed:
      self.shared, self.step = shared, max(step, 0)
      if not self.admitted:
        self.admitted = True
        self._arrival = None
      self.changed.notify_all()
    self._pending = None
    self._told = self.step
    if self._inbox is None:
      self._meet_chief()
    self.tell({"kind": "ack", "applied": self.step})
    return True


def _number(key: str) -> int:
  tail = key.rsplit("/", 1)[-1]
  return int(tail) if tail.isdigit() else -1
