"""From arrivals to commits: what the rules decide is told to everyone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from optax_dist import quorum
from optax_dist.coordinator import ahead, chief_members, data_plane, phases

# A replica so many steps late gets no more means, but a snapshot. It may be less
# late than is known: means are kept for two steps, and it tells after four. One
# that has just got a snapshot is given more time to catch up.
_MAX_LAG = 8
_MAX_LAG_AFTER_SNAPSHOT = 32


class ChiefSteps(chief_members.ChiefMembers):
  """The part of the chief that makes steps; see the module."""

  def _on_arrive(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    peer = self.view.peers[incarnation]
    self._has_applied(incarnation, header["applied"])
    if header["sequence"] <= self._sequences.get(incarnation, -1):
      return  # It was sent again, to be on the safe side.
    self._sequences[incarnation] = header["sequence"]
    local_step = header["local_step"]
    held = self._rules.inside.get(peer.replica)
    inside = held.count if held and held.local_step == local_step else 0
    if inside + header["count"] != header["total"]:
      # A sum whose first part has had another fate meanwhile.
      local_step = -1
    fresh = quorum.accepts(
      local_step, self._rules.step, self._rules.config.max_staleness
    )
    expected = self._plane.place.nbytes if self._inline else 0
    if fresh and header["finite"] and len(payload) != expected:
      self._lose(
        incarnation,
        f"it sent a gradient of {len(payload):,} bytes, not {expected:,}",
      )
      return
    now = self._journal.time() if self._journal else 0.0
    self._arriving = (header, payload, now)
    self._step(
      quorum.Arrive(
        peer.replica,
        local_step,
        header["finite"],
        incarnation,
        header["count"],
      )
    )
    self._attend()

  def _on_done(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    attempt = self._current(header)
    if attempt is None:
      # It may have been quicker than another one's arrival.
      self._reports[incarnation] = header
      return
    self._applied[incarnation] = attempt["step"] + 1  # It will very soon.
    if attempt["witness"] == incarnation:
      self._dismiss_witness()
      return
    replica = self.view.peers[incarnation].replica
    event = quorum.Done(replica, attempt["step"], attempt["attempt"])
    if attempt["witness"] is not None:
      self._held.append(event)
    else:
      self._step(event)

  def _on_failed(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    attempt = self._current(header)
    if attempt is None:
      return
    if attempt["witness"] == incarnation:
      self._dismiss_witness()
      return
    culprit = header["culprit"]
    replica = self.view.peers[incarnation].replica
    # Perhaps it is gone already; it is its gradient that is left out.
    named = [m[1] for m in attempt["members"] if m[0] == culprit]
    self._step(
      quorum.Failed(
        replica,
        attempt["step"],
        attempt["attempt"],
        named[0] if named else None,
      )
    )
    if culprit is not None and culprit != incarnation:
      self._lose(culprit, f"stuck: {header['reason']}")

  def _on_pass(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    attempt = self._current(header)
    if attempt is None:
      self._reports[incarnation] = header
    else:
      self._tell(attempt)

  def _current(self, header: dict[str, Any]) -> dict[str, Any] | None:
    """The attempt under way, if a report is of that, by either number."""
    attempt = self._attempt
    if attempt is None or header["step"] != attempt["step"]:
      return None
    numbers = (attempt["attempt"], attempt["ahead"] or attempt["attempt"])
    return attempt if header["attempt"] in numbers else None

  def _tell(self, attempt: dict[str, Any]) -> None:
    """Tells the members of the attempt, if they were not told before."""
    if not self._told:
      self._told = True
      self._attempt_started = time.monotonic()
      self._post.append(attempt)

  def _heed_reports(self) -> None:
    """Heeds reports that came before the attempt that they are about."""
    if self._attempt is None or self._told or not self._reports:
      return
    early, self._reports = self._reports, {}
    for incarnation, header in early.items():
      if incarnation in self.view.peers:
        getattr(self, f"_on_{header['kind']}")(incarnation, header, b"")

  def _carry_out(self, decisions: Sequence[quorum.Decision]) -> None:
    tokens = self._tokens(decisions)
    told = False
    for decision in decisions:
      match decision:
        case quorum.Accept():
          self._accept()
        case quorum.Drop():
          self._drop(decision, tokens)
          told = True
        case quorum.StartAttempt():
          self._start(decision)
        case quorum.Abandon():
          self._abandon(decision)
        case quorum.Commit():
          if self._inline:
            self._start(decision)
          self._commit(decision, tokens)
          told = True
        case quorum.CannotProceed():
          self._warn_of(decision)
        case quorum.Finished():
          self._begin_to_end()
          return
    if tokens and not told:
      self._post.append({"kind": "token", "tokens": tokens})

  def _tokens(self, decisions: Sequence[quorum.Decision]) -> list[list[int]]:
    """Tokens that ask for more or less than one gradient, or just for more."""
    found: list[list[int]] = []
    config = self._rules.config
    if config.replicas_to_aggregate <= config.total_num_replicas:
      return found
    for decision in decisions:
      if isinstance(decision, quorum.Token):
        peer = self._by_id(decision.replica)
        if peer is not None:
          found.append([peer.incarnation, decision.step, decision.count])
    return found

  def _ask(self, decisions: Sequence[quorum.Decision]) -> None:
    tokens = self._tokens(decisions)
    if tokens:
      self._post.append({"kind": "token", "tokens": tokens, "more": False})

  def _accept(self) -> None:
    event = self._event
    assert isinstance(event, quorum.Arrive)
    assert event.incarnation is not None
    self._arrivals[event.incarnation] = self._arriving
    if self._waiting_since is None:
      self._waiting_since = time.monotonic()

  def _drop(self, drop: quorum.Drop, tokens: list[list[int]]) -> None:
    event, peer = self._event, self._by_id(drop.replica)
    incarnation = peer.incarnation if peer else -1
    its_own = quorum.Arrive | quorum.Lost | quorum.Leave
    if isinstance(event, its_own) and event.replica == drop.replica:
      incarnation = -1 if event.incarnation is None else event.incarnation
    arrived: float | None = None
    header: dict[str, Any] = {}
    its = isinstance(event, quorum.Arrive) and event.replica == drop.replica
    if its and drop.reason is not quorum.Reason.SUPERSEDED:
      header, _, arrived = self._arriving
    else:
      incarnation = self._void.pop(drop.replica, incarnation)
      if incarnation in self._arrivals:
        header, _, arrived = self._arrivals.pop(incarnation)
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

  def _start(self, start: quorum.StartAttempt | quorum.Commit) -> None:
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
      and start.step - self._applied.get(i, start.step)
      <= (_MAX_LAG_AFTER_SNAPSHOT if i in self._unproven else _MAX_LAG)
    ]
    # Whoever has just fetched a snapshot needs the means since then.
    lag = max(
      (
        start.step - self._applied.get(i, start.step)
        for i in audience
        if i in self._unproven
      ),
      default=0,
    )
    witness = None
    if len(members) == 1 and audience and not self._inline:
      # One copy of a committed step would be lost with its process.
      able = [
        i for i in audience if i not in self._unproven and i not in self._behind
      ]
      key = lambda i: (self._applied.get(i, 0), i)
      witness = max(able, key=key, default=None)
    self._attempt_started = time.monotonic()
    self._attempt_time = self._journal.time() if self._journal else None
    self._held, self._void = [], {}
    self._attempt = {
      "kind": "attempt",
      "step": start.step,
      "term": self._term,
      "attempt": start.attempt,
      "members": [list(m) for m in members],
      "audience": audience,
      "witness": witness,
      "lag": lag,
      "ahead": self._number_ahead(start.step, members, audience),
    }
    self._told = self._inline
    if not self._attempt["ahead"]:
      self._tell(self._attempt)

  def _number_ahead(
    self,
    step: int,
    members: Sequence[data_plane.Member],
    audience: Sequence[int],
  ) -> int:
    """The number under which all have offered already what is in; or 0."""
    if audience or self._inline:
      return 0
    who = [m.incarnation for m in members]
    number = ahead.number(self._settings.secret, self._term, step, who)
    said = [self._arrivals[i][0]["ahead"] for i in who]
    return number if all(s == number for s in said) else 0

  def _abandon(self, abandon: quorum.Abandon) -> None:
    attempt, self._attempt = self._attempt, None
    # Who reported has the outcome of what is void, not that step.
    for incarnation, replica, *_ in attempt["members"] if attempt else ():
      self._void[replica] = incarnation
      if self._applied.get(incarnation, 0) > abandon.step:
        self._applied[incarnation] = abandon.step
    reason = f"replica {abandon.culprit!r} could not do its part"
    if self._told and not self._inline:
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

  def _commit(self, commit: quorum.Commit, tokens: list[list[int]]) -> None:
    attempt, self._attempt = self._attempt, None
    assert attempt is not None
    members = [data_plane.Member(*m) for m in attempt["members"]]
    payload = b""
    if self._inline:
      gradients = [self._arrivals[m.incarnation][1] for m in members]
      payload = self._plane.inline_mean(gradients, members)
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
    record = {
      "step": commit.step,
      "attempt": commit.attempt,
      "attempt_time": self._attempt_time,
      "members": told,
    }
    phases.reach("committing", self._me)
    entry = attempt | {"kind": "commit", "tokens": tokens}
    if self._journal is not None:
      # Should this chief die now, the next one can note it.
      entry["record"] = record
    self._post.append(entry, payload)
    self._waiting_since, self._warned = None, 0.0
    self._note("commit", **record)
