"""The chief: messages in, the rules' decisions out; never a large gradient.

Any replica can be chief. Nothing is lost with it: what counts is in the log,
and the next chief asks everyone to arrive again.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import time
from typing import Any

from optax_dist import quorum as rules
from optax_dist.coordinator import (
  chief_post,
  chief_steps,
  engine,
  journal,
  local_line,
)

_log = logging.getLogger("optax_dist.coordinator")

# Seconds between two looks at the clock.
_GLANCE = 0.05


class Chief(chief_steps.ChiefSteps):
  """One term of the role: its thread and its deadlines; see the module."""

  def run(self) -> None:
    try:
      with self._turn:
        self._begin()
      while not self._ended.is_set():
        message: local_line.Mail | None = None
        with contextlib.suppress(queue.Empty):
          message = self._post.received.get(timeout=_GLANCE)
        with self._turn:
          if self._broken is not None:
            raise self._broken
          if message is not None:
            self._handle(*message)
          self._go_on()
          self._look_at_the_clock()
    except (chief_post.Deposed, engine.BoardLost):
      pass
    except Exception as error:
      # Its replica ends with the error; another one can be chief.
      _log.warning("the chief of term %d failed: %r", self._term, error)
      self._failed(error)
      self._post.resign()
    finally:
      self._post.stop()
      # A thread that reads messages may be about to write a record.
      with self._turn:
        self._ended.set()
        if self._journal is not None:
          self._journal.close()

  def _take(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    """Handles a message in the thread that has read it, without a hand-over."""
    with self._turn:
      if self._ended.is_set() or self._broken is not None:
        return
      try:
        self._handle(incarnation, header, payload)
      except Exception as error:
        self._broken = error

  def _handle(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    self._receive(incarnation, header, payload)
    self._heed_reports()
    self._go_on()

  def _go_on(self) -> None:
    while self._queue and self._attempt is None:
      self._receive(*self._queue.popleft())

  def stop(self) -> None:
    """Ends the thread, without a word to anyone."""
    self._ended.set()

  def _begin(self) -> None:
    entry = {
      "kind": "term",
      "term": self._term,
      "incarnation": self._me,
      "step": self._rules.step,
      "address": self._post.address,
    }
    try:
      self._post.append(entry)
    except chief_post.Deposed:
      self._post.withdraw()
      raise
    if not self._first:
      # The log may have gone on beyond what this replica had read.
      self._rules = self._policy.quorum.initial(
        self.view.step, two_phase=not self._inline
      )
    self._post.clear_old()
    self._journal = self._open_journal()
    if self._first:
      quorum = self._policy.quorum
      self._note(
        "run",
        policy=self._policy.name,
        replicas_to_aggregate=quorum.replicas_to_aggregate,
        total_num_replicas=quorum.total_num_replicas,
        max_staleness=quorum.max_staleness,
        lower_on_leave=quorum.lower_on_leave,
        weight=quorum.weight and "inverse_staleness",
        step=self._rules.step,
        wire=self._settings.wire,
        config=dict(self._settings.config),
      )
    self._note(
      "chief",
      replica=self._replica,
      term=self._term,
      step=self._rules.step,
    )
    if not self._first:
      self._note_what_was_not()
    if self._me not in self.view.peers:
      # All who were let in are silent, and may hold another first state.
      for incarnation in list(self.view.peers):
        self._lose(incarnation, "it was silent when a newcomer became chief")
    # What the rules knew of the members, they learn again. What those have
    # under way may be as old as it was.
    now = self._rules.step
    late = self._rules.config.max_staleness
    self._rules = self._rules._replace(step=now - late)
    for replica, how in self.view.gone.items():
      self._rules, _ = rules.step(self._rules, rules.Join(replica))
      kind = rules.Leave if self._counts_as_left(how) else rules.Lost
      self._rules, _ = rules.step(self._rules, kind(replica))
    for peer in list(self.view.peers.values()):
      join = rules.Join(peer.replica, peer.incarnation)
      self._rules, decisions = rules.step(self._rules, join)
      self._ask(decisions)
      self._post.listen(peer)
    self._rules = self._rules._replace(step=now)
    self._post.await_hellos(self.view.hellos)

  def _note_what_was_not(self) -> None:
    """Notes commits that are in the log, but whose chief could not note them."""
    if self._journal is None:
      return
    *_, part = journal.segments(journal.read(self._journal.path).records)
    noted = [r["step"] for r in part if r["kind"] == "commit"]
    last = max(noted, default=part[0].get("step", 0) - 1)
    for entry in self._post.commits_after(last):
      if "record" in entry:
        self._note("commit", **entry["record"])

  def _receive(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    kind = header["kind"]
    if kind == "arrive" and self._policy.alone and self._attempt is not None:
      # Two that arrive meanwhile would be averaged, not taken in turn.
      self._queue.append((incarnation, header, payload))
    elif kind == "hello":
      self._to_welcome.append((incarnation, header))
      self._welcome()
    elif incarnation in self.view.peers:
      handler = getattr(self, f"_on_{kind}", None)
      if handler is None:
        _log.warning("replica sent a message of kind %r; ignored", kind)
        return
      handler(incarnation, header, payload)

  # Deadlines.

  def _look_at_the_clock(self) -> None:
    now = time.monotonic()
    if self._ended.is_set():
      return
    if now - self._post.appended > self._settings.chief_timeout / 4:
      self._post.append({"kind": "tick", "ack": False})
    self._attend()
    if self._attempt is not None:
      self._mind_the_attempt(now - self._attempt_started)
    if self._waiting_since is not None and not self._ended.is_set():
      self._mind_the_wait(now - self._waiting_since)

  def _mind_the_attempt(self, lasts: float) -> None:
    """Whoever does not report in time is given up."""
    patience = self._settings.attempt_timeout
    if self._attempt is None:
      return
    if not self._told and lasts > patience / 4:
      self._tell(self._attempt)
    if not self._told or lasts < 1.5 * patience:
      return
    reporting = set(rules.missing(self._rules).reporting)
    held = {event.replica for event in self._held}
    stuck = [
      incarnation
      for incarnation, replica, *_ in self._attempt["members"]
      if replica in reporting - held
    ]
    if not stuck and self._attempt["witness"] is not None:
      stuck = [self._attempt["witness"]]
    for incarnation in stuck:
      self._lose(incarnation, f"stuck: no report in {lasts:.1f} s")

  def _mind_the_wait(self, waited: float) -> None:
    if waited > self._settings.timeout:
      self._give_up(
        f"Step {self._rules.step} made no progress for {waited:.1f} s: "
        f"{self._who_is_missing()}."
      )
    elif waited - self._warned > self._settings.stall_warning:
      self._warned = waited
      missing = rules.missing(self._rules)
      self._post.append(
        {
          "kind": "stall",
          "step": self._rules.step,
          "waited": waited,
          "text": self._who_is_missing(),
        }
      )
      self._note(
        "stall",
        step=self._rules.step,
        waited=waited,
        missing={k: list(v) for k, v in missing._asdict().items()},
      )

  def _who_is_missing(self) -> str:
    missing = rules.missing(self._rules)
    texts = []
    for what, replicas in (
      ("computing", missing.computing),
      ("aggregating", missing.reporting),
      ("absent", missing.absent),
    ):
      if replicas:
        texts.append(f"{what}: replica {', '.join(map(str, replicas))}")
    return "waiting for " + ("; ".join(texts) or "nobody")
