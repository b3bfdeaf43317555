"""Who is chief: a replica takes the role where it is vacant, and minds it."""

from __future__ import annotations

import time
from typing import Any

from optax_dist.coordinator import errors, follower_state, messages
from optax_dist.coordinator.arrival import Fate


class FollowerChair(follower_state.FollowerState):
  """The part of a follower that deals with chiefs; see the module."""

  def _mind_the_chair(self) -> None:
    """Takes the role of chief if nobody seems to have it."""
    silent = time.monotonic() - self._heard
    # Those who joined first try first.
    candidates = {*self.view.peers, self.incarnation} - {self.view.chief}
    rank = sorted(candidates | {self.incarnation}).index(self.incarnation)
    patience = 0.0 if self._vacant else self._settings.chief_timeout
    if not self.admitted:
      # Until the first commit its state is as good as any; members go first.
      if self.position and (self._committed or not self._from_start):
        return
      patience = 2 * self._settings.chief_timeout
    if silent > patience + 0.2 * rank:
      if self.log.has(self.position):
        return  # It was this process that stood still.
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
      if term <= self.view.term or term > self._claimed:
        # Whoever claimed it may be about to say so.
        self._claimed = max(term, self._claimed)
        return
      # It has died before it could.
      term += 1

  def _on_term(self, entry: dict[str, Any], payload: bytes) -> None:
    # A chief in this process may have been passed over, and not know it.
    self.line.shut(entry["term"] - 1)
    if self.position == 1:
      self._has_all_peers = self._from_start = True
    if self.admitted:
      self._meet_chief()
    elif self.incarnation in self.view.peers:
      self._ask_for_snapshot("the chief that let it in is gone", again=True)
    elif self.view.hellos > self.incarnation:
      # Its request came before others', and will not be read any more.
      self.hello()

  def hello(self) -> None:
    """Asks to be let in; under a new incarnation each time."""
    raise NotImplementedError

  def _meet_chief(self) -> None:
    self._open_inbox()
    self._pending = None
    self._watch_chief()
    with self.changed:
      arrival = self._arrival
      if self._held is not None:
        self._held = None
        if arrival is None:
          # The old chief had it, and the new one can't be told to wait for it.
          self._held_fate = Fate("lost", self.step)
      wishes = list(self._wishes.values())
    if self.step < self.view.step:
      why = f"it is at step {self.step} of {self.view.step}"
      self._ask_for_snapshot(why, again=True)
    else:
      with self.changed:
        self.lacking = False
        self.changed.notify_all()
      self.tell({"kind": "ack", "applied": self.step})
    for wish in wishes:
      self.tell(wish)
    # Whether the old chief has had it or not, the new one has not.
    if arrival is not None:
      self._send_arrival(arrival)

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
    if not self.view.peers and self._has_all_peers:
      self.fail(
        errors.RunFinished(
          "All replicas have left the run, and nobody holds its parameters any "
          f"more: replica {self.replica!r} comes too late."
        )
      )
