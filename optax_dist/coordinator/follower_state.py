"""What a replica's thread knows, and how it speaks to the chief."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from optax_dist import rules
from optax_dist.coordinator import (
  board_log,
  data_plane,
  engine,
  local_line,
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
    shared: the shared state after `step` commits.
    step: the number of commits applied.
    asked: how many gradients its token asks for.
    fate: of the latest arrival, once it is known.
    finished: the reason of a clean end, once it is over.
    failure: the error that all waits raise.
    save_at: the step at which everyone saves, or None.
    missing: who is waited for, as the chief last said.
  """

  def __init__(
    self,
    engine_: engine.Engine,
    settings: options.Options,
    policy: policies.Policy,
    replica: rules.Replica,
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
    self.asked = 1
    self.fate: Fate | None = None
    self.finished: str | None = None
    self.failure: Exception | None = None
    self.save_at: int | None = None
    self.missing = ""
    self.view = views.View()
    self.log = board_log.BoardLog(engine_.board, settings.secret)
    self.line = local_line.LocalLine()
    self.position = 0
    self.gone = False
    self.rejoins = 0
    self._engine, self._settings, self._policy = engine_, settings, policy
    self._plane, self._spec = plane, spec
    self._snapshots = snapshots.Snapshots(engine_, settings.secret)
    self._take_chair = take_chair
    self._inbox: board_log.Inbox | None = None
    self._sending = threading.Lock()
    self._arrival: Arrival | None = None
    self._wish: dict[str, Any] | None = None
    self._pending: tuple[int, int, Any] | None = None
    self._told = step
    self._heard = time.monotonic()
    self._vacant = False
    self._watched: int | None = None
    self._unwatch: Callable[[], None] = lambda: None
    self._stopped = threading.Event()
    self._treedef = jax.tree.structure(shared.params)

  def arrive(self, arrival: Arrival) -> None:
    """Sends a gradient; its fate will be in `fate`."""
    with self.changed:
      self.fate, self._arrival = None, arrival
      self._told = max(self._told, self.step)
    self._send_arrival(arrival)

  def tell(self, header: dict[str, Any], payload: bytes = b"") -> None:
    """Sends a message to the chief of this term, if there is one."""
    with self._sending:
      if self._inbox is None:
        return
      term, me = self.view.term, self.incarnation
      if not self.line.send(term, me, header, payload):
        self._inbox.send(header, payload)

  def wish(self, header: dict[str, Any]) -> None:
    """Tells the chief what stays true, whoever is chief until it is granted."""
    with self.changed:
      self._wish = header
    self.tell(header)

  def stop(self) -> None:
    """Ends the thread."""
    self._stopped.set()
    self._unwatch()

  def fail(self, error: Exception) -> None:
    with self.changed:
      if self.failure is None:
        self.failure = error
      self.changed.notify_all()

  def _decide(self, fate: Fate) -> None:
    with self.changed:
      if self._arrival is not None:
        self._arrival, self.fate = None, fate
      self.changed.notify_all()

  def _send_arrival(self, arrival: Arrival) -> None:
    header = arrival.header | {"applied": self.step}
    self.tell(header, arrival.payload)

  def _ask_for_snapshot(self, why: str) -> None:
    _log.info("replica %r asks for a snapshot: %s", self.replica, why)
    if self._inbox is None or not self.admitted:
      with self._sending:
        self._inbox = board_log.Inbox(
          self._engine.board,
          self._settings.secret,
          self.view.term,
          self.incarnation,
        )
    self.tell({"kind": "behind", "applied": self.step})
