"""The chief: messages in, the rules' decisions out; never a large gradient.

Any replica can be chief. Nothing is lost with it: what counts is in the log,
and the next chief asks everyone to arrive again.
"""

from __future__ import annotations

import copy
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from optax_dist import rules
from optax_dist.coordinator import (
  chief_post,
  data_plane,
  engine,
  journal,
  options,
  phases,
  policies,
)
from optax_dist.coordinator import view as views

_log = logging.getLogger("optax_dist.coordinator")

# A replica so many steps late gets no more means, but a snapshot.
_MAX_LAG = 8


class Chief(threading.Thread):
  """One term of the role; see the module."""

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
    step: int,
    state: str,
    open_journal: Callable[[], journal.Journal | None],
  ):
    super().__init__(name=f"optax-dist-chief-{term}", daemon=True)
    self._settings, self._policy, self._plane = settings, policy, plane
    self._spec, self._term, self._me = spec, term, incarnation
    self.view = copy.deepcopy(view)
    # Whoever starts with this state at this step needs no snapshot.
    self._origin = (step, state)
    self._rules = policy.quorum.initial(step if term == 0 else self.view.step)
    self._post = chief_post.Post(
      engine_,
      settings.secret,
      term,
      position,
      self.view,
      settings.chief_timeout,
    )
    self._open_journal = open_journal
    self._journal: journal.Journal | None = None
    self._inline = plane.place.nbytes <= settings.inline_bytes
    self._applied: dict[int, int] = {}
    self._arrivals: dict[int, tuple[dict[str, Any], bytes, float]] = {}
    self._asked: dict[int, float] = {}
    self._attempt: dict[str, Any] | None = None
    self._attempt_started = 0.0
    self._held: list[rules.Event] = []
    self._to_welcome: list[tuple[int, dict[str, Any]]] = []
    self._behind: set[int] = set()
    self._leaving: dict[int, tuple[int, float]] = {}
    self._prints: dict[int, tuple[str, str, Any]] = {}
    self._waiting_since: float | None = None
    self._warned = 0.0
    self._event: rules.Event | None = None
    self._ended = threading.Event()

  # The loop.

  def run(self) -> None:
    try:
      self._begin()
      while not self._ended.is_set():
        try:
          message = self._post.received.get(timeout=0.05)
        except queue.Empty:
          pass
        else:
          self._receive(*message)
        self._look_at_the_clock()
    except (chief_post.Deposed, engine.BoardLost):
      pass
    except Exception as error:
      _log.exception("the chief of term %d failed", self._term)
      self._try_to_say(error)
    finally:
      self._post.stop()
      if self._journal is not None:
        self._journal.close()

  def stop(self) -> None:
    """Ends the thread, without a word to anyone."""
    self._ended.set()

  def _begin(self) -> None:
    self._post.append(
      {
        "kind": "term",
        "term": self._term,
        "incarnation": self._me,
        "step": self._rules.step,
      }
    )
    self._journal = self._open_journal()
    if self._term == 0:
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
    me = self.view.peers.get(self._me)
    self._note(
      "chief",
      replica=me.replica if me else self._me,
      term=self._term,
      step=self._rules.step,
    )
    # What the rules knew of the members, they learn again.
    for replica, how in self.view.gone.items():
      self._rules, _ = rules.step(self._rules, rules.Join(replica))
      kind = rules.Leave if self._counts_as_left(how) else rules.Lost
      self._rules, _ = rules.step(self._rules, kind(replica))
    for peer in list(self.view.peers.values()):
      join = rules.Join(peer.replica, peer.incarnation)
      self._rules, decisions = rules.step(self._rules, join)
      self._ask(decisions)
      self._post.listen(peer)
    self._post.await_hellos(self.view.hellos)

  def _counts_as_left(self, how: str) -> bool:
    return how == "left" or self._policy.quorum.lower_on_loss

  def _receive(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    kind = header["kind"]
    if kind == "hello":
      self._to_welcome.append((incarnation, header))
      self._welcome()
    elif incarnation in self.view.peers:
      handler = getattr(self, f"_on_{kind}", None)
      if handler is None:
        _log.warning("replica sent a message of kind %r; ignored", kind)
        return
      handler(incarnation, header, payload)

  def _step(self, *events: rules.Event) -> None:
    """Runs events through the rules, and says what they decide."""
    for event in events:
      self._event = event
      self._rules, decisions = rules.step(self._rules, event)
      self._carry_out(decisions)

  # Membership.

  def _welcome(self) -> None:
    """Lets in those who can be; others wait for a peer to learn from."""
    waiting, self._to_welcome = self._to_welcome, []
    for number, header in sorted(waiting, key=lambda w: w[0] != self._me):
      if not self._admit(number, header):
        self._to_welcome.append((number, header))

  def _admit(self, number: int, header: dict[str, Any]) -> bool:
    why = policies.difference(self._spec, header["spec"])
    if why:
      self._post.append(
        {"kind": "refuse", "incarnation": number, "reason": why}
      )
      return True
    peer: int | None = None
    step = self._rules.step
    if (step, header["state"]) != self._origin or header["step"] != step:
      peer = self._who_can_serve(but=number)
      if peer is None:
        return False
    replica = header["replica"]
    for old in list(self.view.peers.values()):
      if old.replica == replica:
        self._lose(old.incarnation, "replaced")
    self._event = join = rules.Join(replica, number)
    self._rules, decisions = rules.step(self._rules, join)
    newcomer = views.Peer(number, replica, header["address"])
    self.view.admit(newcomer)
    counts = [d.count for d in decisions if isinstance(d, rules.Token)]
    self._post.append(
      {
        "kind": "join",
        "incarnation": number,
        "replica": replica,
        "step": self._rules.step,
        "count": counts[0] if counts else 1,
        "peer": peer,
        "view": self.view.dump(),
      }
    )
    self._applied[number] = step
    self._asked[number] = time.monotonic()
    self._post.listen(newcomer)
    self._note("join", replica=replica, incarnation=number, step=step)
    self._carry_out([d for d in decisions if not isinstance(d, rules.Token)])
    return True

  def _who_can_serve(self, but: int) -> int | None:
    """A member that has applied every commit; the last to join, at best."""
    current = [
      i
      for i in self.view.peers
      if i != but
      and i not in self._behind
      and self._applied.get(i, -1) >= self._rules.step
    ]
    others = [i for i in current if i != self._me]
    return max(others or current, default=None)

  def _lose(self, incarnation: int, reason: str) -> None:
    """A replica is gone: "left" in good order, or lost for another reason."""
    peer = self.view.peers.get(incarnation)
    if peer is None:
      return
    self._post.ignore(incarnation)
    self._post.append(
      {
        "kind": "gone",
        "incarnation": incarnation,
        "replica": peer.replica,
        "reason": reason,
      }
    )
    if reason == "left":
      self._note(
        "leave",
        replica=peer.replica,
        incarnation=incarnation,
        step=self._rules.step,
      )
    else:
      self._note(
        "lost",
        replica=peer.replica,
        incarnation=incarnation,
        step=self._rules.step,
        reason=reason,
      )
    self._behind.discard(incarnation)
    self._leaving.pop(incarnation, None)
    if self._attempt and self._attempt["witness"] == incarnation:
      self._dismiss_witness()
    how = "left" if reason == "left" else "lost"
    kind = rules.Leave if self._counts_as_left(how) else rules.Lost
    self._step(kind(peer.replica, incarnation))
    if not self._ended.is_set():
      self._serve_those_behind()
      self._let_go()
      self._end_if_all_are_there()
      self._welcome()

  def _on_lost(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    self._lose(incarnation, header["reason"])

  def _on_ack(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    self._applied[incarnation] = header["applied"]
    if header["applied"] >= self._rules.step:
      self._behind.discard(incarnation)
    self._serve_those_behind()
    self._let_go()
    self._end_if_all_are_there()
    if self._to_welcome and not self._ended.is_set():
      self._welcome()

  def _on_behind(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    self._applied[incarnation] = header["applied"]
    self._behind.add(incarnation)
    self._serve_those_behind()

  def _serve_those_behind(self) -> None:
    for incarnation in sorted(self._behind):
      peer = self._who_can_serve(but=incarnation)
      if peer is not None:
        self._behind.discard(incarnation)
        self._post.append({"kind": "serve", "peer": peer, "to": incarnation})
      elif self._behind >= set(self.view.peers):
        self._give_up(
          f"Step {self._rules.step - 1} was committed by replicas that are "
          "all gone; nobody holds its parameters. Restart from a checkpoint."
        )

  def _on_leave(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    self._leaving[incarnation] = (self._rules.step, time.monotonic())
    others = [i for i in self.view.peers if i != incarnation]
    if any(self._applied.get(i, 0) < self._rules.step for i in others):
      # It may be the only one to have what others have yet to fetch.
      self._post.append({"kind": "tick", "ack": True})
    self._let_go()

  def _let_go(self) -> None:
    for incarnation, (step, since) in list(self._leaving.items()):
      late = [
        i
        for i in self.view.peers
        if i not in self._leaving and self._applied.get(i, 0) < step
      ]
      patient = time.monotonic() - since < self._settings.attempt_timeout
      if (late and patient) or incarnation not in self._leaving:
        continue
      self._lose(incarnation, "left")
      if incarnation == self._me and not self._ended.is_set():
        self._post.append({"kind": "resign", "term": self._term})
        raise chief_post.Deposed

  def _on_end(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    self._reason_of_end = header["reason"]
    self._step(rules.Finish())

  _reason_of_end = "all replicas have left"

  # Steps.

  def _on_arrive(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    peer = self.view.peers[incarnation]
    self._applied[incarnation] = max(
      header["applied"], self._applied.get(incarnation, 0)
    )
    fresh = rules.accepts(
      header["local_step"], self._rules.step, self._rules.config.max_staleness
    )
    expected = self._plane.place.nbytes if self._inline else 0
    if fresh and header["finite"] and len(payload) != expected:
      self._lose(
        incarnation,
        f"it sent a gradient of {len(payload):,} bytes, not {expected:,}",
      )
      return
    now = self._journal.time() if self._journal else 0.0
    self._arrivals[incarnation] = (header, payload, now)
    if self._waiting_since is None:
      self._waiting_since = time.monotonic()
    self._step(
      rules.Arrive(
        peer.replica,
        header["local_step"],
        header["finite"],
        incarnation,
        header["count"],
      )
    )

  def _on_done(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    step, attempt = header["step"], header["attempt"]
    if self._attempt is None or (step, attempt) != (
      self._attempt["step"],
      self._attempt["attempt"],
    ):
      return
    self._applied[incarnation] = step + 1
    if self._attempt["witness"] == incarnation:
      self._dismiss_witness()
      return
    replica = self.view.peers[incarnation].replica
    event = rules.Done(replica, step, attempt)
    if self._attempt["witness"] is not None:
      self._held.append(event)
    else:
      self._step(event)

  def _dismiss_witness(self) -> None:
    if self._attempt is not None:
      self._attempt["witness"] = None
    held, self._held = self._held, []
    self._step(*held)

  def _on_failed(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    step, attempt = header["step"], header["attempt"]
    if self._attempt is None or (step, attempt) != (
      self._attempt["step"],
      self._attempt["attempt"],
    ):
      return
    if self._attempt["witness"] == incarnation:
      self._dismiss_witness()
      return
    culprit = self.view.peers.get(header["culprit"])
    replica = self.view.peers[incarnation].replica
    self._step(
      rules.Failed(
        replica, step, attempt, None if culprit is None else culprit.replica
      )
    )
    if culprit is not None and culprit.incarnation != incarnation:
      self._lose(culprit.incarnation, f"stuck: {header['reason']}")

  def _carry_out(self, decisions: Sequence[rules.Decision]) -> None:
    tokens = self._tokens(decisions)
    told = False
    for decision in decisions:
      match decision:
        case rules.Drop():
          self._drop(decision, tokens)
          told = True
        case rules.StartAttempt():
          self._start(decision)
        case rules.Abandon():
          self._abandon(decision)
        case rules.Commit():
          self._commit(decision, tokens)
          told = True
        case rules.CannotProceed():
          self._warn_of(decision)
        case rules.Finished():
          self._begin_to_end()
          return
    if tokens and not told:
      self._post.append({"kind": "token", "tokens": tokens})

  def _tokens(self, decisions: Sequence[rules.Decision]) -> list[list[int]]:
    """Tokens that ask for more or less than one gradient, or just for more."""
    found = []
    shared = (
      self._rules.config.replicas_to_aggregate
      > self._rules.config.total_num_replicas
    )
    for decision in decisions:
      if isinstance(decision, rules.Token):
        peer = self._by_id(decision.replica)
        if peer is not None:
          self._asked[peer.incarnation] = time.monotonic()
          if shared:
            found.append([peer.incarnation, decision.step, decision.count])
    return found

  def _ask(self, decisions: Sequence[rules.Decision]) -> None:
    tokens = self._tokens(decisions)
    if tokens:
      self._post.append({"kind": "token", "tokens": tokens})

  def _by_id(self, replica: rules.Replica) -> views.Peer | None:
    for peer in self.view.peers.values():
      if peer.replica == replica:
        return peer
    return None

  def _drop(self, drop: rules.Drop, tokens: list[list[int]]) -> None:
    event, peer = self._event, self._by_id(drop.replica)
    incarnation = peer.incarnation if peer else -1
    its_own = rules.Arrive | rules.Lost | rules.Leave
    if isinstance(event, its_own) and event.replica == drop.replica:
      incarnation = -1 if event.incarnation is None else event.incarnation
    header, _, arrived = self._arrivals.get(incarnation, ({}, b"", None))
    self._post.append(
      {
        "kind": "drop",
        "incarnation": incarnation,
        "local_step": drop.local_step,
        "reason": drop.reason.value,
        "count": drop.count,
        "sequence": header.get("sequence", -1),
        "tokens": tokens,
      }
    )
    self._note(
      "drop",
      step=self._rules.step,
      replica=drop.replica,
      incarnation=incarnation,
      local_step=drop.local_step,
      count=drop.count,
      reason=drop.reason.value,
      batches=header.get("batches"),
      compute=header.get("compute"),
      arrived=arrived,
    )

  def _start(self, start: rules.StartAttempt) -> None:
    members = []
    for c in start.members:
      header = self._arrivals[c.incarnation][0]
      members.append(
        data_plane.Member(
          c.incarnation,
          c.replica,
          c.local_step,
          c.count,
          c.weight,
          c.staleness,
          header["sequence"],
        )
      )
    inside = {m.incarnation for m in members}
    audience = [
      i
      for i in self.view.peers
      if i not in inside
      and start.step - self._applied.get(i, start.step) <= _MAX_LAG
    ]
    witness = None
    if len(members) == 1 and audience and not self._inline:
      # One copy of a committed step would be lost with its process.
      witness = max(audience, key=lambda i: (self._applied.get(i, 0), i))
    self._attempt_started = time.monotonic()
    self._attempt_time = self._journal.time() if self._journal else None
    self._held = []
    self._attempt = {
      "kind": "attempt",
      "step": start.step,
      "attempt": start.attempt,
      "members": [list(m) for m in members],
      "audience": audience,
      "witness": witness,
    }
    if not self._inline:
      self._post.append(self._attempt)
      return
    # Everything is here already.
    self._step(
      *(rules.Done(m.replica, start.step, start.attempt) for m in members)
    )

  _attempt_time: float | None = None

  def _abandon(self, abandon: rules.Abandon) -> None:
    self._attempt = None
    reason = f"replica {abandon.culprit!r} could not do its part"
    if not self._inline:
      self._post.append(
        {
          "kind": "abandon",
          "step": abandon.step,
          "attempt": abandon.attempt,
          "reason": reason,
        }
      )
    self._note(
      "abandon",
      step=abandon.step,
      attempt=abandon.attempt,
      culprit=abandon.culprit,
      reason=reason,
    )

  def _commit(self, commit: rules.Commit, tokens: list[list[int]]) -> None:
    attempt, self._attempt = self._attempt, None
    assert attempt is not None
    members = [data_plane.Member(*m) for m in attempt["members"]]
    payload = b""
    if self._inline:
      gradients = [self._arrivals[m.incarnation][1] for m in members]
      payload = self._plane.inline_mean(gradients, members)
    phases.reach("committing", self._me)
    entry = attempt | {"kind": "commit", "tokens": tokens}
    self._post.append(entry, payload)
    self._waiting_since, self._warned = None, 0.0
    told = []
    for m in members:
      header, _, arrived = self._arrivals.pop(m.incarnation)
      told.append(
        {
          "replica": m.replica,
          "incarnation": m.incarnation,
          "local_step": m.local_step,
          "staleness": m.staleness,
          "count": m.gradients,
          "weight": m.weight,
          "batches": header["batches"],
          "compute": header["compute"],
          "arrived": arrived,
        }
      )
    self._note(
      "commit",
      step=commit.step,
      attempt=commit.attempt,
      attempt_time=self._attempt_time,
      members=told,
    )

  # Ends, deadlines and news.

  _ending: float | None = None

  def _begin_to_end(self) -> None:
    """Nothing more is committed; the end waits for those who are behind."""
    if self._ending is None:
      self._ending = time.monotonic()
      self._waiting_since = None
      if self._late():
        self._post.append({"kind": "tick", "ack": True})
    self._end_if_all_are_there()

  def _late(self) -> list[int]:
    return [
      i for i in self.view.peers if self._applied.get(i, 0) < self._rules.step
    ]

  def _end_if_all_are_there(self) -> None:
    if self._ending is None or self._ended.is_set():
      return
    waited = time.monotonic() - self._ending
    if not self._late() or waited > self._settings.attempt_timeout:
      self._finish()

  def _finish(self) -> None:
    ledger = rules.ledger(self._rules)
    dropped = {reason.value: n for reason, n in ledger.dropped.items()}
    counts = ledger._asdict() | {"dropped": dropped}
    self._post.append(
      {
        "kind": "finish",
        "step": self._rules.step,
        "reason": self._reason_of_end,
        "ledger": counts,
      }
    )
    self._note(
      "finish", step=self._rules.step, reason=self._reason_of_end, ledger=counts
    )
    self._ended.set()

  def _give_up(self, reason: str, error: str = "CoordinatorError") -> None:
    self._post.append({"kind": "fail", "reason": reason, "error": error})
    self._note(
      "finish",
      step=self._rules.step,
      reason=reason,
      ledger=None,
    )
    self._ended.set()

  def _try_to_say(self, error: Exception) -> None:
    try:
      self._give_up(f"The chief failed: {type(error).__name__}: {error}")
    except Exception:
      _log.debug("and could not say so", exc_info=True)

  def _warn_of(self, decision: rules.CannotProceed) -> None:
    self._note(
      "cannot_proceed",
      step=decision.step,
      have=decision.have,
      needed=decision.needed,
      missing=list(decision.missing),
      final=decision.final,
    )
    if decision.final:
      self._give_up(f"The run cannot go on: {decision}")
    else:
      self._post.append(
        {
          "kind": "stall",
          "step": decision.step,
          "waited": 0.0,
          "text": str(decision),
        }
      )

  def _look_at_the_clock(self) -> None:
    now = time.monotonic()
    if self._ended.is_set():
      return
    if now - self._post.appended > self._settings.chief_timeout / 4:
      self._post.append({"kind": "tick", "ack": False})
    self._let_go()
    self._end_if_all_are_there()
    started = now - self._attempt_started
    if self._attempt and started > 1.5 * self._settings.attempt_timeout:
      reporting = set(rules.missing(self._rules).reporting)
      for incarnation, replica, *_ in self._attempt["members"]:
        if replica in reporting:
          self._lose(incarnation, f"stuck: no report in {started:.1f} s")
      if self._attempt:
        self._dismiss_witness()
    if self._waiting_since is not None:
      self._mind_the_wait(now - self._waiting_since, now)

  def _mind_the_wait(self, waited: float, now: float) -> None:
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

  def _on_fingerprint(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    step = header["step"]
    replica = self.view.peers[incarnation].replica
    found = (header["params"], header["state"])
    known = self._prints.get(step)
    if known is None:
      self._prints[step] = (*found, replica)
      self._note(
        "fingerprint",
        step=step,
        replica=replica,
        params=found[0],
        state=found[1],
      )
      for old in [s for s in self._prints if s < step - 64]:
        del self._prints[old]
    elif known[:2] != found:
      self._give_up(
        f"After {step} steps replicas {known[2]!r} and {replica!r} hold "
        f"different parameters or optimizer states ({known[:2]} and {found}).",
        "Diverged",
      )

  def _on_save(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    self._post.append({"kind": "save_at", "step": self._rules.step + 1})

  def _note(self, kind: str, **fields: Any) -> None:
    if self._journal is not None:
      self._journal.write(kind, **fields)
