"""Aggregating at once where every replica is needed; see `ahead`."""

from __future__ import annotations

import concurrent.futures
import contextlib
from typing import Any

from optax_dist.coordinator import ahead, data_plane, follower_steps
from optax_dist.coordinator.arrival import Arrival


class FollowerAhead(follower_steps.FollowerSteps):
  """The part of a follower that does not wait to be told; see the module.

  `exchange_ahead` runs in the thread that calls `Replica.step`, which would
  have nothing to do but to wait.
  """

  def _look_ahead(self, arrival: Arrival) -> dict[str, Any] | None:
    """The attempt that will be, if who takes part can be known by now."""
    now = self.view.term, self.step
    if self._ahead_at == now:
      # Another gradient under the same number could be mistaken for this one.
      return None
    peers = dict(self.view.peers)
    needed = self._policy.quorum.replicas_to_aggregate
    total = self._policy.quorum.total_num_replicas
    header = arrival.header
    if (
      arrival.buffer is None
      or self._policy.alone
      or not header["finite"]
      or (header["count"], header["total"]) != (1, 1)
      or header["local_step"] != self.step
      or not 2 <= len(peers) <= needed <= total
      or self.incarnation not in peers
      or not all(map(self._is_near, peers))
    ):
      return None
    self._ahead_at = now
    return ahead.attempt(self._settings.secret, *now, peers)

  def _is_near(self, incarnation: int) -> bool:
    peer = self.view.peers.get(incarnation)
    return incarnation == self.incarnation or (
      peer is not None and self._engine.exchange.is_near(peer.address)
    )

  def _send_new(self, arrival: Arrival) -> None:
    # First: what the log says from now on must not be forgotten.
    self._not_ahead.clear()
    entry = self._look_ahead(arrival)
    if entry is not None:
      self._ahead = arrival.header["ahead"] = entry["attempt"]
      self._next_exchange = entry, arrival
    # Before anything is exchanged: who is stuck in that is not computing.
    self._send_arrival(arrival)

  def exchange_ahead(self) -> None:
    """Aggregates with all others what has just arrived, if that may be."""
    if self._next_exchange is None:
      return
    (entry, arrival), self._next_exchange = self._next_exchange, None
    key = {"step": entry["step"], "attempt": entry["attempt"]}
    with self._exchanging:
      try:
        if self._is_decided():
          return
        mean = self._plane.aggregate(
          self.incarnation,
          arrival.buffer,
          entry,
          dict(self.view.peers),
          ahead.patience(arrival.buffer.nbytes),
          self._is_decided,
          self.replica,
        )
        mean.check()
      except data_plane.AttemptFailed:
        self._tell_later({"kind": "pass"} | key)
        return
      self._report(entry, mean, self._tell_later)

  def _is_decided(self) -> bool:
    return (
      self._not_ahead.is_set()
      or self.fate is not None
      or self._stopped.is_set()
    )

  def _tell_later(self, header: dict[str, Any]) -> None:
    """Has it sent, in turn, while this thread goes on."""
    if self._sender is None:
      self._sender = concurrent.futures.ThreadPoolExecutor(
        1, thread_name_prefix="optax-dist-tells"
      )
    with contextlib.suppress(RuntimeError):  # It has been closed meanwhile.
      self._sender.submit(self.tell, header)

  def stop(self) -> None:
    super().stop()
    if self._sender is not None:
      self._sender.shutdown(wait=False, cancel_futures=True)
