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
    if not self.position:
      # The answer comes later: what is gone by now can't be it.
      self.position = self.log.trimmed()
    number = max(map(_number, board.items("hello")), default=-1) + 1
    while True:
      key = f"hello/{number}"
      blob = messages.pack(self._settings.secret, key, header)
      if board.put(key, blob):
        break
      number += 1
    with self.changed:
      self.incarnation, self.admitted = number, False
      self.lacking = False
    if not self.position:
      # Where the log has begun there is a chief, or there was one: by now this
      # one may know too little to be the next.
      self._claim(0)

  def _on_join(self, entry: dict[str, Any], payload: bytes) -> None:
    self._has_all_peers = True
    if entry["incarnation"] == self.incarnation:
      self._admitted(entry)
    elif self.admitted and entry["peer"] == self.incarnation:
      self._serve(entry["incarnation"])

  def _admitted(self, entry: dict[str, Any]) -> None:
    self._count = entry["count"]
    if entry["peer"] is not None:
      with self.changed:
        self.lacking = True
      self._restore(entry["peer"])
    elif entry["step"] == self.step:
      self._take_part()
    else:
      raise errors.CoordinatorError(
        f"The job is at step {entry['step']} and this replica at {self.step}, "
        "with nobody to take a snapshot from."
      )

  _count = 1

  def _take_part(self) -> None:
    """It has the state of this step: from now on it is a member."""
    self._decide(Fate("lost", self.step))
    with self.changed:
      self.admitted, self.asked = True, self._count
      self.changed.notify_all()
    self._told = self.step
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
      if self.view.chief is None:
        self._on_resign(entry, payload)
      return
    if entry["reason"] == "left":
      with self.changed:
        self.gone = True
        self.changed.notify_all()
      return
    if entry["reason"] == "replaced":
      # Were it to join again, the two would go on replacing each other.
      self.fail(
        errors.CoordinatorError(
          f"Another process has joined as replica {self.replica!r}, and takes "
          "the place of this one. If both are wanted, they need numbers of "
          "their own."
        )
      )
      return
    # It was taken for dead (stopped, or cut off), and is not.
    self._rejoin(entry["reason"])

  def _rejoin(self, why: str) -> None:
    _log.warning(
      "replica %r was given up (%s); it joins again", self.replica, why
    )
    with self.changed:
      self.rejoins += 1
      self.admitted = False
    self._decide(Fate("lost", self.step))
    self._pending = None
    self.hello()

  def _serve(self, to: int) -> None:
    peer = self.view.peers.get(to)
    if peer is not None and self.step == self.view.step:
      phases.reach("serving", self.replica)
      self._snapshots.serve(
        self.shared, self.step, self.position, to, peer.address
      )

  def _on_serve(self, entry: dict[str, Any], payload: bytes) -> None:
    if entry["peer"] == self.incarnation:
      self._serve(entry["to"])
    elif entry["to"] == self.incarnation and self.lacking:
      self._restore(entry["peer"])

  def _restore(self, peer: int) -> None:
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
      self._ask_for_snapshot(
        f"the snapshot of {self.view.name(peer)}: {error}", again=True
      )
      return
    self._pending = None
    with self.changed:
      self.lacking = False
      self.shared, self.step = shared, step
      self._keep_to_save()
      self.changed.notify_all()
    if self.admitted:
      self._told = self.step
      self.tell({"kind": "ack", "applied": self.step})
    else:
      self._take_part()

  def _keep_to_save(self) -> None:
    at = self.save_at
    if at is None or self.step < at:
      return
    if self.to_save is None or self.to_save[1] < at:
      self.to_save = (self.shared, self.step)


def _number(key: str) -> int:
  tail = key.rsplit("/", 1)[-1]
  return int(tail) if tail.isdigit() else -1
