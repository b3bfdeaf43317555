"""How a run ends, well or not, and how replicas are compared until then."""

from __future__ import annotations

import time
from typing import Any

from optax_dist import quorum
from optax_dist.coordinator import chief_state


class ChiefEnds(chief_state.ChiefState):
  """The part of the chief that ends runs; see the module."""

  def _on_end(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    self._reason_of_end = header["reason"]
    self._step(quorum.Finish())

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
      i for i in self.view.peers if not self._has_all_of(self._rules.step, i)
    ]

  def _end_if_all_are_there(self) -> None:
    if self._ending is None or self._ended.is_set():
      return
    waited = time.monotonic() - self._ending
    if not self._late() or waited > self._settings.attempt_timeout:
      self._finish()

  def _finish(self) -> None:
    ledger = quorum.ledger(self._rules)
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

  def _warn_of(self, decision: quorum.CannotProceed) -> None:
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

  def _on_fingerprint(
    self, incarnation: int, header: dict[str, Any], payload: bytes
  ) -> None:
    step = header["step"]
    self._has_applied(incarnation, step)
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
    if self._save_at <= self._rules.step:
      self._save_at = self._rules.step + 1
    self._post.append({"kind": "save_at", "step": self._save_at})
