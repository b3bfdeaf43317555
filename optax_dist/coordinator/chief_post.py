"""What the chief reads and writes: inboxes, requests to join, the log."""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from optax_dist.coordinator import (
  board_log,
  engine,
  inboxes,
  local_line,
  messages,
)
from optax_dist.coordinator import view as views

_log = logging.getLogger("optax_dist.coordinator")
_SLICE = 0.5
# Entries of the log that stay for replicas that are late.
_KEPT = 4 * board_log.BLOCK


class Deposed(Exception):
  """Another replica is chief now."""


class Post:
  """One chief's mail.

  Attributes:
    received: tuples (incarnation, header, payload) of its own replica, and of
      what has happened to others; what those say is given to `take`.
    position: where the next entry of the log goes.
    address: of this process.
    appended: when the last one was written, by the monotonic clock.
  """

  def __init__(
    self,
    engine_: engine.Engine,
    secret: bytes,
    term: int,
    position: int,
    view: views.View,
    patience: float,
    me: int,
    line: local_line.LocalLine,
    take: Callable[[int, dict[str, Any], bytes], None],
  ):
    self._engine, self._secret = engine_, secret
    self._term, self._view, self._patience = term, view, patience
    self._log = board_log.BoardLog(engine_.board, secret, notes=engine_.notes)
    self.received: queue.SimpleQueue[local_line.Mail] = queue.SimpleQueue()
    self.position = position
    self.address = engine_.exchange.address
    self.appended = time.monotonic()
    self._sure = time.monotonic()
    self._stopped = threading.Event()
    self._me, self._line, self._take = me, line, take
    self._readers: dict[int, threading.Event] = {}
    self._unwatch: dict[int, Callable[[], None]] = {}
    line.open(term, self.received)

  def append(self, entry: dict[str, Any], payload: bytes = b"") -> None:
    """Writes an entry of the log, and takes it into account.

    Raises:
      Deposed: another chief has written.
    """
    try:
      self._put(entry, payload)
    except board_log.Trimmed:
      raise Deposed from None
    self._check_role()
    self._line.deliver(self.position, entry, payload)
    self.position += 1
    self.appended = time.monotonic()
    self._view.update(entry)
    if self.position % board_log.BLOCK == 0:
      self._log.trim(self.position - _KEPT)

  def _put(self, entry: dict[str, Any], payload: bytes) -> None:
    # With a payload there is something to prepare.
    while not self._append(entry, payload, foretell=bool(payload)):
      try:
        found, _ = self._log.read(self.position, 1.0)
      except messages.BadMessage:
        # No member wrote it: everyone passes over it.
        self.position += 1
        continue
      if found["kind"] == "term" or entry["kind"] != "term":
        raise Deposed
      # The old chief was quicker; it will notice at its next entry.
      self._view.update(found)
      self.position += 1

  def _append(
    self, entry: dict[str, Any], payload: bytes, foretell: bool
  ) -> bool:
    if foretell:
      self._line.foretell(self.position, entry, payload)
    return self._log.append(self.position, entry, payload, foretell)

  def _check_role(self) -> None:
    """After a long silence another may have been chief, and trimmed the log."""
    now = time.monotonic()
    if now - self._sure > self._patience / 2:
      key = f"chief/{self._term + 1}"
      later = self._engine.board.try_get(key)
      if later is not None:
        with contextlib.suppress(messages.BadMessage):
          messages.unpack(self._secret, key, later)
          raise Deposed
    self._sure = now

  def commits_after(self, step: int) -> list[dict[str, Any]]:
    """The commits of the log that are of later steps, as far as it goes back."""
    found: list[dict[str, Any]] = []
    for position in range(self.position - 1, self._log.trimmed() - 1, -1):
      try:
        entry, _ = self._log.read(position, self._patience)
      except messages.BadMessage:
        continue
      except (board_log.Trimmed, engine.EngineTimeout):
        break
      if entry["kind"] == "commit":
        if entry["step"] <= step:
          break
        found.insert(0, entry)
    return found

  def listen(self, peer: views.Peer) -> None:
    """Reads a replica's messages, and notices when its process ends."""
    if peer.incarnation == self._me:
      return  # It has a line of its own, and ends when this process does.
    ended = threading.Event()
    self._readers[peer.incarnation] = ended
    inbox = inboxes.inbox(
      self._engine,
      self._secret,
      self._term,
      peer.incarnation,
      peer.address,
    )
    threading.Thread(
      target=self._read,
      args=(peer, inbox, ended),
      name=f"optax-dist-chief-reads-{peer.replica}",
      daemon=True,
    ).start()

    def lost() -> None:
      header = {"kind": "lost", "reason": "its process has ended"}
      self.received.put((peer.incarnation, header, b""))

    self._unwatch[peer.incarnation] = self._engine.exchange.watch(
      peer.address, lost
    )

  def ignore(self, incarnation: int) -> None:
    """Reads no more of a replica."""
    if incarnation in self._readers:
      self._readers.pop(incarnation).set()
      self._unwatch.pop(incarnation)()
      with contextlib.suppress(engine.BoardLost):
        inboxes.clear(self._engine.board, self._term, incarnation)

  def _read(
    self, peer: views.Peer, inbox: inboxes.AnyInbox, ended: threading.Event
  ) -> None:
    while not (ended.is_set() or self._stopped.is_set()):
      try:
        self._take(peer.incarnation, *inbox.receive(_SLICE))
      except engine.EngineTimeout:
        continue
      except messages.BadMessage as error:
        _log.warning(
          "a message of replica %r is ignored: %s", peer.replica, error
        )
      except (engine.BoardLost, engine.PeerLost):
        return

  def await_hellos(self, first: int) -> None:
    """Reads requests to join, from this number on."""
    threading.Thread(
      target=self._read_hellos,
      args=(first,),
      name="optax-dist-chief-welcomes",
      daemon=True,
    ).start()

  def _read_hellos(self, number: int) -> None:
    while not self._stopped.is_set():
      key = f"hello/{number}"
      try:
        blob = self._engine.board.get(key, _SLICE)
        header, payload = messages.unpack(self._secret, key, blob)
        self.received.put((number, header, payload))
      except engine.EngineTimeout:
        continue
      except messages.BadMessage as error:
        _log.warning("request %d to join is ignored: %s", number, error)
      except engine.BoardLost:
        return
      number += 1

  def clear_old(self) -> None:
    """Removes what was sent to the chief before; nobody reads it any more."""
    if self._term > 0:
      inboxes.clear(self._engine.board, self._term - 1)

  def withdraw(self) -> None:
    """Gives a claim to the role back that was never used."""
    self._engine.board.delete(f"chief/{self._term}")

  def resign(self) -> None:
    """Tells the others, if it can be, that they may take the role."""
    try:
      self.append({"kind": "resign", "term": self._term})
    except Exception:
      _log.debug("a chief could not resign", exc_info=True)

  def stop(self) -> None:
    """Ends its threads."""
    self._line.shut(self._term)
    self._stopped.set()
    for incarnation in list(self._readers):
      self.ignore(incarnation)
