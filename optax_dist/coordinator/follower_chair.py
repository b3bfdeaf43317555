"""Who is chief: a replica takes the role where it is vacant, and minds it."""

from __future__ import annotations

import time
from typing import Any

from optax_dist.coordinator import board_log, follower_state, messages


class FollowerChair(follower_state.FollowerState):
  """The part of a follower that deals with chiefs; see the module."""

  def _mind_the_chair(self) -> None:
    """Takes the role of chief if nobody seems to have it."""
    silent = time.monotonic() - self._heard
    # Those who joined first try first.
    candidates = {*self.view.peers, self.incarnation} - {self.view.chief}
    rank = sorted(candidates | {self.incarnation}).index(self.incarnation)
    patience = 0.0 if self._vacant else self._settings.chief_timeout
    if self.admitted and silent > patience + 0.2 * rank:
      self._heard, self._vacant = time.monotonic(), False
      self._claim(self.view.term + 1)

  def _claim(self, term: int) -> None:
    """Becomes chief of a term that nobody else has claimed."""
    board, secret = self._engine.board, self._settings.secret
    header = {"kind": "chief", "incarnation": self.incarnation}
    while True:
      key = f"chief/{term}"
      if board.put(key, messages.pack(secret, key, header)):
        self._take_chair(self, term, self.position)
        return
      if term <= self.view.term or not self.admitted:
        return
      # Whoever claimed it has died before it could say so.
      term += 1

  def _on_term(self, entry: dict[str, Any], payload: bytes) -> None:
    if self.admitted:
      self._meet_chief()

  def _meet_chief(self) -> None:
    with self._sending:
      self._inbox = board_log.Inbox(
        self._engine.board,
        self._settings.secret,
        self.view.term,
        self.incarnation,
      )
    self._pending = None
    self._watch_chief()
    with self.changed:
      arrival = self._arrival
      wish = self._wish
    if self.step < self.view.step:
      self._ask_for_snapshot(f"it is at step {self.step} of {self.view.step}")
    else:
      self.tell({"kind": "ack", "applied": self.step})
    if wish is not None:
      self.tell(wish)
    if arrival is not None:
      # Whether the old chief has had it or not, the new one has not.
      total = arrival.header["total"]
      self._send_arrival(
        arrival._replace(header=arrival.header | {"count": total})
      )

  def _watch_chief(self) -> None:
    chief = self.view.chief
    self._unwatch()
    self._unwatch = lambda: None
    peer = self.view.peers.get(chief) if chief is not None else None
    if peer is not None and chief != self.incarnation:
      term = self.view.term

      def lost() -> None:
        if self.view.term == term:
          self._vacant = True

      self._unwatch = self._engine.exchange.watch(peer.address, lost)

  def _on_resign(self, entry: dict[str, Any], payload: bytes) -> None:
    self._vacant = True
