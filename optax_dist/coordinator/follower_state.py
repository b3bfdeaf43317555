"""What a replica's thread knows, and how it speaks to the chief."""

from __future__ import annotations

import concurrent.futures
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from optax_dist import quorum
from optax_dist.coordinator import (
  board_log,
  data_plane,
  engine,
  inboxes,
  local_line,
  log_reader,
  options,
  policies,
  snapshots,
)
from optax_dist.coordinator import view as views
from optax_dist.coordinator.arrival import Arrival, Fate

_log = logging.getLogger("optax_dist.coordinator")


class FollowerState(threading.Thread):
  """The state of a follower; what is done with it stands in the subclasses.

  Attributes:
    changed: guards what follows, and tells of changes.
    incarnation: the number of this replica's admission.
    admitted: whether it takes part.
    lacking: whether it waits for a peer's state, for it can't have its own.
    shared: the shared state after `step` commits.
    step: the number of commits applied.
    asked: how many gradients its token asks for.
    fate: of the latest arrival, once it is known.
    finished: the reason of a clean end, once it is over.
    failure: the error that all waits raise.
    save_at: the step at which everyone saves, or None.
    to_save: the shared state of that step and the step, once it is there.
    missing: who is waited for, as the chief last said.
  """

  def __init__(
    self,
    engine_: engine.Engine,
    settings: options.Options,
    policy: policies.Policy,
    replica: quorum.Replica,
    shared: Any,
    plane: data_plane.DataPlane,
    spec: dict[str, str],
    step: int,
    take_chair: Callable[[Any, int, int], None],
  ):
    super().__init__(name=f"optax-dist-replica-{replica}", daemon=True)
    self.changed = threading.Condition()
    self.replica = replica
    self.shared, self.step = shared, step
    self.incarnation = -1
    self.admitted = False
    self.lacking = False
    self.asked = 1
    self.fate: Fate | None = None
    self.finished: str | None = None
    self.failure: Exception | None = None
    self.save_at: int | None = None
    self.to_save: tuple[Any, int] | None = None
    self.missing = ""
    self.view = views.View()
    self.log = board_log.BoardLog(engine_.board, settings.secret)
    self.line = local_line.LocalLine()
    self._reader = log_reader.LogReader(
      self.log, self.line, engine_.notes, self._prepare
    )
    self.position = 0
    self.gone = False
    self.rejoins = 0
    self._engine, self._settings, self._policy = engine_, settings, policy
    self._plane, self._spec = plane, spec
    self._snapshots = snapshots.Snapshots(engine_, settings.secret)
    self._take_chair = take_chair
    self._inbox: inboxes.AnyInbox | None = None
    self._inbox_term = self._inbox_of = -1
    self._sending = threading.Lock()
    self._arrival: Arrival | None = None
    # An arrival that was taken in, while more is asked for.
    self._held: Arrival | None = None
    self._held_fate: Fate | None = None
    self._wishes: dict[str, dict[str, Any]] = {}
    self._claimed = -1
    # Whether it has read the log from the start, or of a membership since.
    self._has_all_peers = self._from_start = False
    self._committed = False
    self._pending: tuple[int, int, Any] | None = None
    # The state before a commit that was foretold, that commit, the state after.
    self._prepared: tuple[Any, log_reader.Entry, Any] | None = None
    # One attempt at a time; the next one that need not be told, the number and
    # the term and step of the last such one, and whether to give it up.
    self._exchanging = threading.Lock()
    self._next_exchange: tuple[dict[str, Any], Arrival] | None = None
    self._ahead, self._ahead_at = 0, (-1, -1)
    self._not_ahead = threading.Event()
    self._sender: concurrent.futures.Executor | None = None
    self._told = step
    self._heard = time.monotonic()
    self._vacant = False
    self._unwatch: Callable[[], None] = lambda: None
    self._stopped = threading.Event()
    self._treedef = jax.tree.structure(shared.params)

  def arrive(self, arrival: Arrival, rejoins: int) -> None:
    """Sends a gradient; its fate will be in `fate`.

    Args:
      arrival: what is sent.
      rejoins: how often the replica had joined again when it was computed.
    """
    with self.changed:
      if not self.admitted or rejoins != self.rejoins:
        # It was given up meanwhile, and with it what it had computed.
        self.fate = Fate("lost", self.step)
        return
      if self._held_fate is not None:
        # It has the sum of what was decided on its own.
        self.fate = Fate("superseded", self.step)
        return
      self.fate, self._arrival = None, arrival
      self._told = max(self._told, self.step)
    self._send_new(arrival)

  def _send_new(self, arrival: Arrival) -> None:
    raise NotImplementedError

  def _prepare(self, found: log_reader.Entry) -> None:
    raise NotImplementedError

  def take_held_fate(self) -> Fate | None:
    """What became of a sum that was in while more was asked for, once."""
    with self.changed:
      fate, self._held_fate = self._held_fate, None
      return fate

  def tell(self, header: dict[str, Any], payload: bytes = b"") -> None:
    """Sends a message to the chief of this term, if there is one."""
    with self._sending:
      self._send(header, payload)

  def _send(self, header: dict[str, Any], payload: bytes) -> None:
    if self._inbox is None:
      return
    term, me = self._inbox_term, self._inbox_of
    if not self.line.send(term, me, header, payload):
      self._inbox.send(header, payload)

  def wish(self, header: dict[str, Any]) -> None:
    """Tells the chief what stays true, whoever is chief until it is granted."""
    with self.changed:
      self._wishes[header["kind"]] = header
    self.tell(header)

  def stop(self) -> None:
    """Ends the thread."""
    self._stopped.set()
    self._unwatch()

  def fail(self, error: Exception) -> None:
    """Ends the replica: what it waits for now or later raises the error."""
    with self.changed:
      if self.failure is None:
        self.failure = error
      self.changed.notify_all()

  def _decide(self, fate: Fate, sequence: int | None = None) -> None:
    """Tells what became of an arrival; of all there are by default."""
    with self.changed:
      arrival, held = self._arrival, self._held
      if arrival and sequence in (None, arrival.header["sequence"]):
        self._arrival, self.fate = None, fate
        if sequence is not None and fate.reason is None:
          self._held = held = None  # It was part of it.
      if held and sequence in (None, held.header["sequence"]):
        self._held, self._held_fate = None, fate
      self.changed.notify_all()

  def _send_arrival(self, arrival: Arrival) -> None:
    header = arrival.header | {"applied": self.step}
    if self._held is None:
      # The chief has had nothing of it yet.
      header["count"] = header["total"]
    self.tell(header, arrival.payload)

  def _open_inbox(self) -> None:
    """Messages go to the chief of this term from now on."""
    with self._sending:
      key = (self.view.term, self.incarnation)
      if (self._inbox_term, self._inbox_of) != key:
        self._inbox_term, self._inbox_of = key
        self._inbox = inboxes.inbox(
          self._engine, self._settings.secret, *key, self.view.chief_address
        )

  def _ask_for_snapshot(self, why: str, again: bool = False) -> None:
    if self.lacking and not again:
      return
    _log.info("replica %r asks for a snapshot: %s", self.replica, why)
    with self.changed:
      self.lacking = True
    self._open_inbox()
    self.tell({"kind": "behind", "applied": self.step})
