"""Who takes part: joining, leaving, being lost, and catching up."""

from __future__ import annotations

import time
from typing import Any

from optax_dist import quorum
from optax_dist.coordinator import chief_ends, chief_post, specs
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
    why = specs.difference(self._spec, header["spec"])
    if why:
      self._post.append(
        {"kind": "refuse", "incarnation": number, "reason": why}
      )
      return True
    peer: int | None = None
    step, replica = self._rules.step, header["replica"]
    before = self._by_id(replica)
    old = number if before is None else before.incarnation
    if (step, header["state"]) != self._origin or header["step"] != step:
      peer = self._who_can_serve(number, old)
      if peer is None:
        return False
    self._lose(old, "replaced")
    self._event = join = quorum.Join(replica, number)
    self._rules, decisions = quorum.step(self._rules, join)
    newcomer = views.Peer(number, replica, header["address"])
    self.view.admit(newcomer)
    counts = [d.count for d in decisions if isinstance(d, quorum.Token)]
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
    self._applied[number] = self._surely[number] = step
    if peer is not None:
      self._unproven.add(number)
      self._served[number] = peer
    self._post.listen(newcomer)
    self._note("join", replica=replica, incarnation=number, step=step)
    self._carry_out([d for d in decisions if not isinstance(d, quorum.Token)])
    return True

  def _who_can_serve(self, whom: int, old: int = -1) -> int | None:
    """A member that has applied every commit; the last to join, at best."""
    current = [
      i
      for i in self.view.peers
      if i not in (whom, old)
      and i not in self._behind
      and i not in self._unproven
      and self._applied.get(i, -1) >= self._rules.step
    ]
    tried = self._behind.get(whom, set())
    fresh = [i for i in current if i not in tried]
    others = [i for i in fresh if i != self._me]
    return max(others or fresh or current, default=None)

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
    self._forget(incarnation)
    if self._attempt and self._attempt["witness"] == incarnation:
      self._dismiss_witness()
    kind: type[quorum.Leave | quorum.Lost] = quorum.Lost
    if reason != "replaced" and self._counts_as_left(reason):
      kind = quorum.Leave
    self._step(kind(peer.replica, incarnation))
    if not self._arrivals:
      self._waiting_since = None
    self._attend()

  def _forget(self, incarnation: int) -> None:
    self._behind.pop(incarnation, None)
    self._unproven.discard(incarnation)
    for known in (
      self._leaving,
      self._served,
      self._applied,
      self._surely,
      self._sequences,
      self._reports,
    ):
      known.pop(incarnation, None)

  def _attend(self) -> None:
    """Serves those who wait for others to have the state of this step."""
    for part in (
      self._serve_those_behind,
      self._let_go,
      self._end_if_all_are_there,
      self._welcome,
    ):
      if self._ended.is_set():
        return
      part()
    waiting = self._behind or self._to_welcome or self._leaving
    if waiting and self._asked_at < self._rules.step:
      # Those who compute for long tell only now and then what they have.
      self._asked_at = self._rules.step
      self._post.append({"kind": "tick", "ack": True})

  def _on_lost(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    self._lose(incarnation, header["reason"])

  def _on_ack(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    self._has_applied(incarnation, header["applied"])
    # Whoever lacks the state says nothing.
    self._unproven.discard(incarnation)
    self._behind.pop(incarnation, None)
    self._served.pop(incarnation, None)
    self._attend()

  def _on_behind(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    self._applied[incarnation] = self._surely[incarnation] = header["applied"]
    tried = self._behind.setdefault(incarnation, set())
    if incarnation in self._served:
      tried.add(self._served.pop(incarnation))
    self._attend()

  def _serve_those_behind(self) -> None:
    for incarnation in sorted(self._behind.keys() - self._served.keys()):
      peer = self._who_can_serve(incarnation)
      if peer is not None:
        self._served[incarnation] = peer
        self._unproven.add(incarnation)
        self._applied[incarnation] = self._surely[incarnation] = (
          self._rules.step
        )
        self._post.append({"kind": "serve", "peer": peer, "to": incarnation})
      elif self._behind.keys() >= set(self.view.peers):
        self._give_up(
          f"Step {self._rules.step - 1} was committed by replicas that are "
          "all gone; nobody holds its parameters. Restart from a checkpoint."
        )

  def _on_leave(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    self._leaving[incarnation] = (self._rules.step, time.monotonic())
    self._asked_at = -1
    self._attend()

  def _let_go(self) -> None:
    """Lets those leave whose state nobody has yet to fetch."""
    for incarnation, (step, since) in list(self._leaving.items()):
      late = [
        i
        for i in self.view.peers
        if i not in self._leaving and not self._has_all_of(step, i)
      ]
      patient = time.monotonic() - since < self._settings.attempt_timeout
      if (late and patient) or incarnation not in self._leaving:
        continue
      self._lose(incarnation, "left")
      if incarnation == self._me and not self._ended.is_set():
        # Whoever reads that a chief has left knows that there is none.
        raise chief_post.Deposed
