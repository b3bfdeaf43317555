"""What a chief knows, and the ways in which it speaks: log, journal, rules."""

from __future__ import annotations

import collections
import copy
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any

from optax_dist import quorum
from optax_dist.coordinator import (
  chief_post,
  data_plane,
  engine,
  journal,
  local_line,
  options,
  policies,
)
from optax_dist.coordinator import view as views

_log = logging.getLogger("optax_dist.coordinator")


class ChiefState(threading.Thread):
  """The state of one term; what is done with it stands in the subclasses.

  Attributes:
    view: who takes part, as of the chief's last entry in the log.
  """

  def __init__(
    self,
    engine_: engine.Engine,
    settings: options.Options,
    policy: policies.Policy,
    plane: data_plane.DataPlane,
    spec: dict[str, str],
    view: views.View,
    *,
    term: int,
    position: int,
    incarnation: int,
    replica: quorum.Replica,
    step: int,
    state: str,
    line: local_line.LocalLine,
    open_journal: Callable[[], journal.Journal | None],
    failed: Callable[[Exception], None] = lambda error: None,
  ):
    super().__init__(name=f"optax-dist-chief-{term}", daemon=True)
    self._settings, self._policy, self._plane = settings, policy, plane
    self._replica = replica
    self._spec, self._term, self._me = spec, term, incarnation
    self.view = copy.deepcopy(view)
    # Whoever starts with this state at this step needs no snapshot.
    self._origin = (step, state)
    self._first = self.view.term < 0
    # Gradients that ride in the messages are averaged without anyone's help.
    self._inline = plane.place.nbytes <= settings.inline_bytes
    self._rules = policy.quorum.initial(
      step if self._first else self.view.step, two_phase=not self._inline
    )
    self._post = chief_post.Post(
      engine_,
      settings.secret,
      term,
      position,
      self.view,
      settings.chief_timeout,
      incarnation,
      line,
      self._take,
    )
    # Messages are handled one at a time, by whoever has read them.
    self._turn = threading.Lock()
    self._broken: Exception | None = None
    self._open_journal = open_journal
    self._failed = failed
    self._journal: journal.Journal | None = None
    # Commits that each has applied, or is applying; and what it has surely.
    self._applied: dict[int, int] = {}
    self._surely: dict[int, int] = {}
    self._arriving: tuple[dict[str, Any], bytes, float] = ({}, b"", 0.0)
    # The accepted ones whose fate is open.
    self._arrivals: dict[int, tuple[dict[str, Any], bytes, float]] = {}
    self._sequences: dict[int, int] = {}
    self._save_at = -1
    self._attempt: dict[str, Any] | None = None
    self._attempt_started = 0.0
    # Whether its members were told of it; and reports of what is yet to start.
    self._told = True
    self._reports: dict[int, dict[str, Any]] = {}
    self._held: list[quorum.Done] = []
    self._queue: collections.deque[tuple[int, dict[str, Any], bytes]] = (
      collections.deque()
    )
    # Whose gradients were in the attempt that was abandoned last.
    self._void: dict[quorum.Replica, int] = {}
    self._to_welcome: list[tuple[int, dict[str, Any]]] = []
    # Those without the state of this step, and who could not give it to them.
    self._behind: dict[int, set[int]] = {}
    # Who was told to serve them.
    self._served: dict[int, int] = {}
    # Those who have not said yet that they have the state they were let in to.
    self._unproven: set[int] = set()
    self._asked_at = -1
    self._leaving: dict[int, tuple[int, float]] = {}
    self._prints: dict[int, tuple[str, str, Any]] = {}
    self._waiting_since: float | None = None
    self._warned = 0.0
    self._event: quorum.Event | None = None
    self._ended = threading.Event()
    self._attempt_time: float | None = None
    self._ending: float | None = None
    self._reason_of_end = "all replicas have left"

  # To be done above.

  def _take(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    raise NotImplementedError

  def _carry_out(self, decisions: Sequence[quorum.Decision]) -> None:
    raise NotImplementedError

  # Here.

  def _step(self, *events: quorum.Event) -> None:
    """Runs events through the rules, and says what they decide."""
    for event in events:
      self._event = event
      self._rules, decisions = quorum.step(self._rules, event)
      self._carry_out(decisions)

  def _note(self, kind: str, **fields: Any) -> None:
    if self._journal is None:
      return
    try:
      self._journal.write(kind, **fields)
    except OSError:
      # A full disk must not end the training.
      _log.exception("the journal can't be written any more")
      self._journal.close()
      self._journal = None

  def _give_up(self, reason: str, error: str = "CoordinatorError") -> None:
    self._post.append({"kind": "fail", "reason": reason, "error": error})
    self._note(
      "finish",
      step=self._rules.step,
      reason=reason,
      ledger=None,
    )
    self._ended.set()

  def _by_id(self, replica: quorum.Replica) -> views.Peer | None:
    for peer in self.view.peers.values():
      if peer.replica == replica:
        return peer
    return None

  def _has_applied(self, incarnation: int, step: int) -> None:
    for known in (self._applied, self._surely):
      known[incarnation] = max(step, known.get(incarnation, 0))

  def _has_all_of(self, step: int, incarnation: int) -> bool:
    """Whether a replica needs nothing more of others for the state of a step."""
    return (
      self._surely.get(incarnation, 0) >= step
      and incarnation not in self._behind
      and incarnation not in self._unproven
    )

  def _counts_as_left(self, how: str) -> bool:
    return how == "left" or self._policy.quorum.lower_on_loss

  def _dismiss_witness(self) -> None:
    if self._attempt is not None:
      self._attempt["witness"] = None
    held, self._held = self._held, []
    self._step(*held)
