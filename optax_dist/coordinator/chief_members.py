"""Who takes part: joining, leaving, being lost, and catching up."""

from __future__ import annotations

import time
from typing import Any

from optax_dist import rules
from optax_dist.coordinator import chief_ends, chief_post, policies
from optax_dist.coordinator import view as views


class ChiefMembers(chief_ends.ChiefEnds):
  """The part of the chief that keeps the members; see the module."""

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
