"""A replica's thread that reads the log and does what it says.

It applies commits as they come, also while the replica still computes on older
parameters; takes its part in attempts; and takes the role of chief where that
is vacant.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from optax_dist import rules
from optax_dist.coordinator import (
  board_log,
  data_plane,
  engine,
  errors,
  messages,
  options,
  phases,
  policies,
  snapshots,
)
from optax_dist.coordinator import view as views
from optax_dist.coordinator.fingerprint import fingerprint

_log = logging.getLogger("optax_dist.coordinator")

# How long one read of the log blocks before the thread looks around.
_SLICE = 0.1
# Commits after which a replica that says nothing else tells where it is.
_ACK_EVERY = 4


class Arrival(NamedTuple):
  """A gradient that was sent and whose fate is not known yet.

  Attributes:
    header: what the chief was told.
    payload: the gradient, where it rides in the message.
    buffer: the gradient, where it does not.
  """

  header: dict[str, Any]
  payload: bytes
  buffer: Any


class Fate(NamedTuple):
  """What became of an arrival.

  Attributes:
    reason: why it was dropped; None where it was not.
    step: the global step then.
    members: the replicas that took part in the commit.
    staleness: how many steps late it was.
    before: the shared state before the commit.
    asked: gradients that are asked for beyond this one.
  """

  reason: str | None
  step: int
  members: tuple[Any, ...] = ()
  staleness: int = 0
  before: Any = None
  asked: int = 0


class Follower(threading.Thread):
  """Reads the log; see the module.

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
    take_chair: Callable[[Follower, int, int], None],
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

  # What the replica's own thread calls.

  def hello(self) -> None:
    """Asks to be let in; under a new incarnation each time."""
    board = self._engine.board
    header = {
      "kind": "hello",
      "replica": self.replica,
      "address": self._engine.exchange.address,
      "spec": self._spec,
      "step": self.step,
      "state": fingerprint(self.shared),
    }
    phases.reach("joining", self.replica)
    number = max(map(_number, board.items("hello")), default=-1) + 1
    while True:
      key = f"hello/{number}"
      blob = messages.pack(self._settings.secret, key, header)
      if board.put(key, blob):
        break
      number += 1
    with self.changed:
      self.incarnation, self.admitted = number, False
    self._claim(0)

  def arrive(self, arrival: Arrival) -> None:
    """Sends a gradient; its fate will be in `fate`."""
    with self.changed:
      self.fate, self._arrival = None, arrival
      self._told = max(self._told, self.step)
    self._send_arrival(arrival)

  def tell(self, header: dict[str, Any], payload: bytes = b"") -> None:
    """Sends a message to the chief of this term, if there is one."""
    with self._sending:
      if self._inbox is not None:
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

  # The thread.

  def run(self) -> None:
    try:
      self._follow()
    except engine.BoardLost as error:
      if not self._stopped.is_set():
        self._fail(errors.CoordinatorError(f"The board is lost: {error}."))
    except Exception as error:
      self._fail(error)

  def _follow(self) -> None:
    while not self._stopped.is_set() and self.failure is None:
      try:
        entry, payload = self.log.read(self.position, _SLICE)
      except engine.EngineTimeout:
        self._mind_the_chair()
        continue
      except board_log.Trimmed:
        self.position = self.log.trimmed()
        if self.admitted:
          self._ask_for_snapshot("the log has gone on without it")
        continue
      except messages.BadMessage as error:
        _log.warning("entry %d of the log is ignored: %s", self.position, error)
        self.position += 1
        continue
      self._heard, self._vacant = time.monotonic(), False
      self.position += 1
      self.view.update(entry)
      handler = getattr(self, f"_on_{entry['kind']}", None)
      if handler is not None:
        handler(entry, payload)

  def _fail(self, error: Exception) -> None:
    with self.changed:
      if self.failure is None:
        self.failure = error
      self.changed.notify_all()

  # The chief.

  def _mind_the_chair(self) -> None:
    """Takes the role of chief if nobody seems to have it."""
    silent = time.monotonic() - self._heard
    # Those who joined first try first.
    rank = sorted([*self.view.peers, self.incarnation]).index(self.incarnation)
    patience = 0.0 if self._vacant else self._settings.chief_timeout
    if self.admitted and silent > patience + 0.2 * rank:
      self._heard, self._vacant = time.monotonic(), False
      self._claim(self.view.term + 1)

  def _claim(self, term: int) -> None:
    """Becomes chief of a term that nobody else has claimed."""
    board, secret = self._engine.board, self._settings.secret
    header = {"kind": "chief", "incarnation": self.incarnation}
    while True:
      key = f"chief/{term}"
      if board.put(key, messages.pack(secret, key, header)):
        self._take_chair(self, term, self.position)
        return
      if term <= self.view.term or not self.admitted:
        return
      # Whoever claimed it has died before it could say so.
      term += 1

  def _on_term(self, entry: dict[str, Any], payload: bytes) -> None:
    if self.admitted:
      self._meet_chief()

  def _meet_chief(self) -> None:
    with self._sending:
      self._inbox = board_log.Inbox(
        self._engine.board,
        self._settings.secret,
        self.view.term,
        self.incarnation,
      )
    self._pending = None
    self._watch_chief()
    with self.changed:
      arrival = self._arrival
      wish = self._wish
    if self.step < self.view.step:
      self._ask_for_snapshot(f"it is at step {self.step} of {self.view.step}")
    else:
      self.tell({"kind": "ack", "applied": self.step})
    if wish is not None:
      self.tell(wish)
    if arrival is not None:
      # Whether the old chief has had it or not, the new one has not.
      total = arrival.header["total"]
      self._send_arrival(
        arrival._replace(header=arrival.header | {"count": total})
      )

  def _send_arrival(self, arrival: Arrival) -> None:
    header = arrival.header | {"applied": self.step}
    self.tell(header, arrival.payload)

  def _watch_chief(self) -> None:
    chief = self.view.chief
    self._unwatch()
    self._unwatch = lambda: None
    peer = self.view.peers.get(chief) if chief is not None else None
    if peer is not None and chief != self.incarnation:
      term = self.view.term

      def lost() -> None:
        if self.view.term == term:
          self._vacant = True

      self._unwatch = self._engine.exchange.watch(peer.address, lost)

  def _on_resign(self, entry: dict[str, Any], payload: bytes) -> None:
    self._vacant = True

  # Membership.

  def _on_join(self, entry: dict[str, Any], payload: bytes) -> None:
    if entry["incarnation"] == self.incarnation:
      self._admitted(entry)
    elif self.admitted and entry["peer"] == self.incarnation:
      self._serve(entry["incarnation"])

  def _admitted(self, entry: dict[str, Any]) -> None:
    if entry["peer"] is not None:
      if not self._restore(entry["peer"]):
        return
    elif entry["step"] != self.step:
      raise errors.CoordinatorError(
        f"The job is at step {entry['step']} and this replica at {self.step}, "
        "with nobody to take a snapshot from."
      )
    with self.changed:
      self.admitted, self.asked = True, entry["count"]
      self._arrival = None
      self._told = self.step
      self.changed.notify_all()
    self._meet_chief()

  def _on_refuse(self, entry: dict[str, Any], payload: bytes) -> None:
    if entry["incarnation"] == self.incarnation:
      self._fail(
        errors.JoinRefused(
          f"The job refuses replica {self.replica!r}: {entry['reason']}."
        )
      )

  def _on_gone(self, entry: dict[str, Any], payload: bytes) -> None:
    if entry["incarnation"] != self.incarnation:
      return
    if entry["reason"] == "left":
      with self.changed:
        self.gone = True
        self.changed.notify_all()
      return
    # It was taken for dead (stopped, or cut off), and is not.
    _log.warning(
      "replica %r was given up (%s); it joins again",
      self.replica,
      entry["reason"],
    )
    self._decide(Fate("lost", self.step))
    self.rejoins += 1
    self._pending = None
    self.hello()

  def _serve(self, to: int) -> None:
    peer = self.view.peers.get(to)
    if peer is not None:
      phases.reach("serving", self.replica)
      self._snapshots.serve(
        self.shared, self.step, self.position, to, peer.address
      )

  def _on_serve(self, entry: dict[str, Any], payload: bytes) -> None:
    if entry["peer"] == self.incarnation:
      self._serve(entry["to"])
    elif entry["to"] == self.incarnation:
      self._restore(entry["peer"])

  def _restore(self, peer: int) -> bool:
    """Takes over the state of a peer, as of this position of the log."""
    try:
      found = self.view.peers.get(peer)
      if found is None:
        raise engine.PeerLost("it is gone")
      phases.reach("fetching_snapshot", self.replica)
      shared, step = self._snapshots.fetch(
        self.shared,
        self.position,
        self.incarnation,
        found.address,
        self._settings.attempt_timeout,
        self._stopped.is_set,
      )
    except (
      engine.EngineTimeout,
      engine.PeerLost,
      engine.OfferGone,
      messages.BadMessage,
    ) as error:
      self._ask_for_snapshot(f"the snapshot of {self.view.name(peer)}: {error}")
      return False
    with self.changed:
      self.shared, self.step = shared, max(step, 0)
      if not self.admitted:
        self.admitted = True
        self._arrival = None
      self.changed.notify_all()
    self._pending = None
    self._told = self.step
    if self._inbox is None:
      self._meet_chief()
    self.tell({"kind": "ack", "applied": self.step})
    return True

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

  # Steps.

  def _on_attempt(self, entry: dict[str, Any], payload: bytes) -> None:
    if not self.admitted or entry["step"] != self.step:
      return
    members = [data_plane.Member(*m) for m in entry["members"]]
    mine = [m for m in members if m.incarnation == self.incarnation]
    witness = entry["witness"] == self.incarnation
    if not mine and not witness:
      return
    key = {"step": entry["step"], "attempt": entry["attempt"]}
    try:
      if mine:
        arrival = self._arrival
        if (
          arrival is None
          or arrival.buffer is None
          or arrival.header["sequence"] != mine[0].sequence
        ):
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
      after = self._apply(mean)
    except data_plane.AttemptFailed as error:
      if not self._overtaken():
        report = key | {"culprit": error.culprit, "reason": str(error)[:200]}
        self.tell({"kind": "failed"} | report)
      return
    self._pending = (entry["step"], entry["attempt"], after)
    phases.reach("done", self.replica)
    self._told = self.step + 1
    self.tell({"kind": "done"} | key)

  def _overtaken(self) -> bool:
    """Whether the log has gone on: the attempt will not be waited for."""
    return self._stopped.is_set() or self.log.has(self.position)

  def _collect(self, entry: dict[str, Any]) -> data_plane.Mean:
    return self._plane.collect(
      entry,
      self.view.peers,
      self._settings.attempt_timeout,
      self._stopped.is_set,
    )

  def _apply(self, mean: data_plane.Mean) -> Any:
    tree = jax.tree.unflatten(self._treedef, mean.leaves)
    after = jax.block_until_ready(self._policy.apply(self.shared, tree))
    mean.check()
    return after

  def _on_commit(self, entry: dict[str, Any], payload: bytes) -> None:
    if not self.admitted or entry["step"] < self.step:
      return
    step, attempt = entry["step"], entry["attempt"]
    if step > self.step:
      self._ask_for_snapshot(f"it is at step {self.step} of {step}")
      return
    if payload:
      leaves = self._plane.read_inline(payload)
      after = self._apply(data_plane.Mean(leaves, lambda: None))
    elif self._pending is not None and self._pending[:2] == (step, attempt):
      after = self._pending[2]
    else:
      if self.incarnation not in entry["audience"]:
        self._ask_for_snapshot("it has fallen behind")
        return
      try:
        after = self._apply(self._collect(entry))
      except data_plane.AttemptFailed as error:
        self._ask_for_snapshot(
          f"the mean of step {step}: {self.view.name(error.culprit)} {error}"
        )
        return
    self._pending = None
    self._publish(entry, after)

  def _publish(self, entry: dict[str, Any], after: Any) -> None:
    members = [data_plane.Member(*m) for m in entry["members"]]
    mine = [m for m in members if m.incarnation == self.incarnation]
    with self.changed:
      before, self.shared = self.shared, after
      self.step = step = entry["step"] + 1
      self.missing = ""
      self._take_tokens(entry)
      if mine:
        ids = tuple(m.replica for m in members)
        self._decide(Fate(None, step, ids, mine[0].staleness, before))
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
        if self._arrival is not None:
          self._decide(Fate("more", self.step, asked=self.asked))
      else:
        self.asked = before
      self.changed.notify_all()

  def _on_drop(self, entry: dict[str, Any], payload: bytes) -> None:
    if entry["incarnation"] != self.incarnation:
      return
    with self.changed:
      arrival = self._arrival
      self._take_tokens(entry)
      if arrival and arrival.header["sequence"] == entry["sequence"]:
        self._decide(Fate(entry["reason"], self.step))

  def _decide(self, fate: Fate) -> None:
    with self.changed:
      if self._arrival is not None:
        self._arrival, self.fate = None, fate
      self.changed.notify_all()

  # News.

  def _on_tick(self, entry: dict[str, Any], payload: bytes) -> None:
    if entry["ack"] and self.admitted:
      self._told = self.step
      self.tell({"kind": "ack", "applied": self.step})

  def _on_stall(self, entry: dict[str, Any], payload: bytes) -> None:
    with self.changed:
      self.missing = entry["text"]
    _log.warning(
      "step %d has waited %.1f s: %s",
      entry["step"],
      entry["waited"],
      entry["text"],
    )

  def _on_fail(self, entry: dict[str, Any], payload: bytes) -> None:
    kind = (
      errors.Diverged
      if entry["error"] == "Diverged"
      else errors.CoordinatorError
    )
    self._fail(kind(entry["reason"]))

  def _on_save_at(self, entry: dict[str, Any], payload: bytes) -> None:
    with self.changed:
      self.save_at = entry["step"]
      self.changed.notify_all()

  def _on_finish(self, entry: dict[str, Any], payload: bytes) -> None:
    with self.changed:
      self.finished = entry["reason"]
      self._decide(Fate("finished", self.step))
      self.changed.notify_all()


def _number(key: str) -> int:
  tail = key.rsplit("/", 1)[-1]
  return int(tail) if tail.isdigit() else -1
