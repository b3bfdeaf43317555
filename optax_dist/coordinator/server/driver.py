"""The event loop of the coordinator: events become inputs, effects are executed.

The core decides, one input at a time and in the order of the events; effects happen
in their order, too: what a record decides is in the log before anybody is told.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time

import msgspec

from optax_dist.coordinator.protocol import codec, inputs, notes
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.coordinator.coordinator import Coordinator
from optax_dist.coordinator.protocol.messages import MESSAGES
from optax_dist.coordinator.server import configure, journal_lines
from optax_dist.coordinator.server.log import Log
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport import sockets

_log = logging.getLogger("optax_dist.coordinator")

#: The name of a coordinator's process, for its members.
NAME = "coordinator"
# The longest time to wait for an event, in seconds.
_SLICE = 1.0
# Seconds between two warnings that the log can't be written.
_AGAIN = 60.0


class Server:
  """Runs a coordinator on a transport.

  Attributes:
    clients: how many processes are connected.
    idle_since: since when none is; by `time.monotonic`.
  """

  def __init__(
    self, transport: sockets.Transport, log: Log, journal: str | None = None
  ):
    """Continues a log, and begins another epoch.

    Args:
      transport: named `NAME`; the server owns it from now on.
      log: the log.
      journal: path of the journal; None for that of the job.

    Raises:
      LogError: the log can't be continued.
    """
    self._transport, self._log = transport, log
    history = log.read()
    self._core = Coordinator(
      configure.config_of, history, secrets.token_hex(16)
    )
    self._journal_path = journal
    self._journal: journal_lines.JournalLines | None = None
    self._warned_at = -_AGAIN
    self.idle_since = time.monotonic()
    self._step(inputs.Started())

  @property
  def clients(self) -> int:
    """How many processes are connected."""
    return len(self._transport.peers())

  @property
  def is_over(self) -> bool:
    """Whether the run has ended."""
    return self._core.is_over

  @property
  def outdated(self) -> str:
    """Why it must end: another coordinator has started since; "" if none."""
    return self._core.outdated

  def poll(self, timeout: float) -> None:
    """Handles events, and waits for more if there are none.

    Args:
      timeout: the longest time to wait, in seconds.
    """
    due = self._core.deadline() - self._transport.now()
    for event in self._transport.poll(max(0.0, min(timeout, due))):
      self._on_event(event)
    if self._core.deadline() <= self._transport.now():
      self._step(inputs.TimePassed())
    if self.clients:
      self.idle_since = time.monotonic()

  def wake(self) -> None:
    """Ends the current `poll`; from any thread."""
    self._transport.wake()

  def close(self, reason: str = "the coordinator has ended") -> None:
    """Says goodbye to all."""
    self._transport.close(reason)
    if self._journal is not None:
      self._journal.close()
    self._log.close()

  def _on_event(self, event: transports.Event) -> None:
    match event:
      case transports.Message(peer, payload):
        try:
          message = MESSAGES.decode(payload)
        except codec.BadMessage as error:
          self._step(inputs.Malformed(peer, str(error)))
          return
        self._step(inputs.Received(peer, message))
      case transports.PeerLost(peer, how, reason):
        self._step(inputs.PeerLost(peer, how, reason))
      case _:
        pass  # It exchanges no arrays.

  def _step(self, input_: inputs.Input) -> None:
    for effect in self._core.step(input_, self._transport.now()):
      self._execute(effect)

  def _execute(self, effect: fx.Effect) -> None:
    match effect:
      case fx.Append(record):
        wrong = self._log.append(record, self._core.history)
        if wrong and time.monotonic() >= self._warned_at + _AGAIN:
          self._warned_at = time.monotonic()
          _log.warning(
            "The coordinator's log can't be written: %s. The run goes on; if its"
            " coordinator dies now, its replicas bring back what is missing.",
            wrong,
          )
      case fx.Send(peer, message):
        self._transport.send(peer, [MESSAGES.encode(message)])
      case fx.SendAll(peers, message):
        encoded = MESSAGES.encode(message)
        for peer in peers:
          self._transport.send(peer, [encoded])
      case fx.Disconnect(peer, reason):
        self._transport.disconnect(peer, reason)
      case fx.WriteJournal(note):
        # The file may be slow, and others wait for the step.
        self._transport.flush()
        self._write(note)
      case fx.Log(level, text):
        _log.log(getattr(logging, level.upper()), text)
      case _:
        raise AssertionError(f"a coordinator has no effect {effect!r}")

  def _write(self, note: notes.Record) -> None:
    history = self._core.history
    if self._journal is None:
      if history.job is None:
        return  # There is no run yet.
      path = self._journal_path or history.job.journal or None
      about = msgspec.json.decode(history.job.about)
      self._journal = journal_lines.JournalLines(path, about)
      self._journal.open(
        [notes.committed(commit) for commit in history.recent], history.step
      )
    self._journal.write(note)


def serve(
  transport: sockets.Transport,
  log: Log,
  ended: threading.Event,
  journal: str | None = None,
) -> None:
  """Runs a coordinator until `ended` is set; for a thread."""
  server = Server(transport, log, journal)
  try:
    while not ended.is_set() and not server.outdated:
      server.poll(_SLICE)
  finally:
    server.close()


