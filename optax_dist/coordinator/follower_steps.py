"""Taking part in attempts, and applying commits as they come."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax

from optax_dist.coordinator import (
  board_log,
  data_plane,
  engine,
  follower_members,
  log_reader,
  messages,
  phases,
)
from optax_dist.coordinator.arrival import Arrival, Fate
from optax_dist.coordinator.fingerprint import fingerprint

# Commits after which a replica that says nothing else tells where it is.
_ACK_EVERY = 4
# Entries after which nobody waits for an attempt any more.
_ENDS_ATTEMPT = ("abandon", "commit", "term", "finish", "fail")


class FollowerSteps(follower_members.FollowerMembers):
  """The part of a follower that makes steps; see the module."""

  def _on_attempt(self, entry: dict[str, Any], payload: bytes) -> None:
    if not self.admitted:
      return
    members = [data_plane.Member(*m) for m in entry["members"]]
    mine = [m for m in members if m.incarnation == self.incarnation]
    witness = entry["witness"] == self.incarnation
    if not mine and not witness:
      return
    self._not_ahead.set()
    with self._exchanging:
      self._take_part_in(entry, mine)

  def _take_part_in(
    self, entry: dict[str, Any], mine: list[data_plane.Member]
  ) -> None:
    """Does what a member does, or else the witness."""
    try:
      if entry["step"] != self.step:
        raise data_plane.AttemptFailed(self.incarnation, "it has fallen behind")
      if mine:
        arrival = self._find(mine[0].sequence)
        if arrival is None:
          raise data_plane.AttemptFailed(self.incarnation, "nothing to give")
        mean = self._plane.aggregate(
          self.incarnation,
          arrival.buffer,
          entry,
          self.view.peers,
          self._settings.attempt_timeout,
          self._overtaken,
          self.replica,
        )
      else:
        mean = self._collect(entry)
      mean.check()
    except data_plane.AttemptFailed as error:
      if not self._overtaken():
        key = {"step": entry["step"], "attempt": entry["attempt"]}
        report = key | {"culprit": error.culprit, "reason": str(error)[:200]}
        self.tell({"kind": "failed"} | report)
      return
    self._report(entry, mean, self.tell)

  def _report(
    self,
    entry: dict[str, Any],
    mean: data_plane.Mean,
    tell: Callable[[dict[str, Any]], None],
  ) -> None:
    """Says that the mean is here, and applies it until that is committed."""
    step, attempt = entry["step"], entry["attempt"]
    phases.reach("done", self.replica)
    tell({"kind": "done", "step": step, "attempt": attempt})
    with contextlib.suppress(data_plane.AttemptFailed):
      # What was overwritten meanwhile is asked for again at the commit.
      self._pending = (step, attempt, self._apply(mean, entry))

  def _find(self, sequence: int) -> Arrival | None:
    """The arrival of this number, where it has something to offer."""
    with self.changed:
      for arrival in (self._arrival, self._held):
        if arrival and arrival.header["sequence"] == sequence:
          return arrival if arrival.buffer is not None else None
    return None

  _peeked = 0

  def _overtaken(self) -> bool:
    """Whether the log says that the attempt will not be waited for."""
    position = max(self._peeked, self.position)
    while not self._stopped.is_set():
      entry = self._peek(position)
      if entry is None:
        return False
      gone = entry["kind"] == "gone"
      if entry["kind"] in _ENDS_ATTEMPT or (
        gone and entry["incarnation"] == self.incarnation
      ):
        return True
      # Others may come and go meanwhile.
      self._peeked = position = position + 1
    return True

  def _peek(self, position: int) -> dict[str, Any] | None:
    """The entry that the log has there by now; of no kind if it is unreadable."""
    if not self.log.has(position):
      return None
    try:
      return self.log.read(position, 0.1)[0]
    except (messages.BadMessage, board_log.Trimmed, engine.EngineTimeout):
      return {"kind": ""}

  def _collect(self, entry: dict[str, Any]) -> data_plane.Mean:
    kept = entry["step"] + data_plane.KEPT + entry.get("lag", 0)
    return self._plane.collect(
      entry,
      self.view.peers,
      self._settings.attempt_timeout,
      lambda: self._stopped.is_set() or self._is_committed(kept),
    )

  # Up to where the log was looked through, and the last commit in it.
  _looked = (0, -1)

  def _is_committed(self, step: int) -> bool:
    """Whether the log goes on to this step: older means are there no more."""
    position, latest = self._looked  # Several threads may ask at a time.
    position = max(position, self.position)
    while latest < step:
      entry = self._peek(position)
      if entry is None:
        return position < self.log.trimmed()
      if entry["kind"] == "commit":
        latest = entry["step"]
      position += 1
      self._looked = position, latest
    return True

  def _apply(
    self, mean: data_plane.Mean, entry: dict[str, Any], wait: bool = True
  ) -> Any:
    tree = jax.tree.unflatten(self._treedef, mean.leaves)
    policy, members = self._policy, len(entry["members"])
    if policy.sums and members != policy.quorum.replicas_to_aggregate:
      # Some have left.
      after = policy.apply(self.shared, tree, members)
    else:
      after = policy.apply(self.shared, tree)
    if wait:  # A mean in memory of others must be used before it is gone.
      after = jax.block_until_ready(after)
      mean.check()
    return after

  def _on_commit(self, entry: dict[str, Any], payload: bytes) -> None:
    if not self.admitted or entry["step"] < self.step:
      return
    step, attempt = entry["step"], entry["attempt"]
    if step > self.step:
      self._miss(entry, f"it is at step {self.step} of {step}")
      return
    if self._ahead != entry.get("ahead"):
      self._not_ahead.set()
    with self._exchanging:
      pending, self._pending = self._pending, None
    numbers = (attempt, entry.get("ahead"))
    if payload:
      after = self._take_prepared((entry, payload))
      if after is None:
        after = self._apply_inline(entry, payload)
    elif pending and pending[0] == step and pending[1] in numbers:
      after = pending[2]
    else:
      if self.incarnation not in entry["audience"]:
        self._miss(entry, "it has fallen behind")
        return
      try:
        after = self._apply(self._collect(entry), entry)
      except data_plane.AttemptFailed as error:
        self._ask_for_snapshot(
          f"the mean of step {step}: {self.view.name(error.culprit)} {error}"
        )
        return
    self._publish(entry, after)

  def _prepare(self, found: log_reader.Entry) -> None:
    entry, payload = found
    current = self.admitted and not self.lacking
    if payload and current and entry.get("step") == self.step:
      with contextlib.suppress(messages.BadMessage):
        after = self._apply_inline(entry, payload)
        self._prepared = self.shared, found, after

  def _take_prepared(self, found: log_reader.Entry) -> Any:
    """The state after this commit, if it was foretold like this."""
    prepared, self._prepared = self._prepared, None
    if prepared is None or prepared[0] is not self.shared:
      return None
    return prepared[2] if prepared[1] == found else None

  def _apply_inline(self, entry: dict[str, Any], payload: bytes) -> Any:
    leaves = self._plane.read_inline(payload)
    return self._apply(data_plane.Mean(leaves, lambda: None), entry, wait=False)

  def _miss(self, entry: dict[str, Any], why: str) -> None:
    """A commit that it can't apply, though it may have taken part in it."""
    # In this order: nobody may take the old state for what comes after that.
    self._ask_for_snapshot(why)
    self._decide_by(entry, self.shared)

  def _decide_by(self, entry: dict[str, Any], before: Any) -> None:
    """Tells what became of the own gradient, if the commit has it."""
    members = [data_plane.Member(*m) for m in entry["members"]]
    ids = tuple(m.replica for m in members)
    for m in members:
      if m.incarnation == self.incarnation:
        fate = Fate(None, entry["step"] + 1, ids, m.staleness, before)
        self._decide(fate, m.sequence)

  def _publish(self, entry: dict[str, Any], after: Any) -> None:
    with self.changed:
      before, self.shared = self.shared, after
      self.step = step = entry["step"] + 1
      self.missing = ""
      self._take_tokens(entry)
      self._decide_by(entry, before)
      self._keep_to_save()
      self.changed.notify_all()
    phases.reach("applied", self.replica)
    every = self._settings.fingerprint_every
    if every and step % every == 0:
      self.tell(
        {
          "kind": "fingerprint",
          "step": step,
          "params": fingerprint(after.params),
          "state": fingerprint(after),
        }
      )
    if step - self._told >= _ACK_EVERY:
      self._told = step
      self.tell({"kind": "ack", "applied": step})

  def _take_tokens(self, entry: dict[str, Any]) -> None:
    for incarnation, _, count in entry["tokens"]:
      if incarnation == self.incarnation:
        self.asked = count

  def _on_token(self, entry: dict[str, Any], payload: bytes) -> None:
    with self.changed:
      before = self.asked
      self.asked = 0
      self._take_tokens(entry)
      if self.asked:
        if self._arrival is not None and entry.get("more", True):
          # What has arrived stays in; what comes next is added to it.
          self._held, self._arrival = self._arrival, None
          self.fate = Fate("more", self.step)
      else:
        self.asked = before
      self.changed.notify_all()

  def _on_drop(self, entry: dict[str, Any], payload: bytes) -> None:
    if entry["incarnation"] != self.incarnation:
      return
    with self.changed:
      self._take_tokens(entry)
      self._decide(Fate(entry["reason"], self.step), entry["sequence"])
