"""The event loop of the coordinator: events become inputs, effects are executed.

The core decides, one input at a time and in the order of the events; effects happen in
their order, too: a decision is in the log before any process is notified of it.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable

import optax_dist
from optax_dist.coordinator.protocol import (
  codec,
  deadlines,
  inputs,
  journal_events,
)
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol.coordinator.coordinator import Coordinator
from optax_dist.coordinator.protocol.messages import (
  MESSAGES,
  Hello,
  Host,
  Meet,
  Refused,
)
from optax_dist.coordinator.server import configure, journal_lines
from optax_dist.coordinator.server.log import Log, LogError
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport import sockets

_log = logging.getLogger("optax_dist.coordinator")

#: The name of a coordinator's process, for its members.
NAME = "coordinator"
# The longest time to wait for an event, in seconds.
_POLL_SECONDS = 1.0
# Seconds between two warnings that the log can't be written.
_AGAIN = 60.0


class _Run:
  """One run that a server coordinates."""

  def __init__(self, name: str, log: Log):
    self.name, self.log = name, log
    try:
      history = log.read()
    except LogError:
      log.close()  # So that a later attempt can open it again.
      raise
    nonce = secrets.token_hex(16)
    self.core = Coordinator(configure.config_of, history, nonce)
    self.journal: journal_lines.JournalLines | None = None
    # The journal's path, and the fields of the run's first line.
    self.described = "", ""

  @property
  def goes_on(self) -> bool:
    """Whether it has begun, and not ended."""
    return self.core.history.job is not None and not self.core.is_over

  def close(self) -> None:
    """Closes its files."""
    if self.journal is not None:
      self.journal.close()
    self.log.close()


class Server:
  """Runs a coordinator on a transport; for each run that is called by its name.

  Attributes:
    idle_since: since when no process is connected; by `time.monotonic`.
  """

  def __init__(
    self,
    transport: sockets.Transport,
    open_log: Callable[[str], Log],
    journal: str | None = None,
  ):
    """Continues the log of the run without a name, and begins another epoch.

    Args:
      transport: named `NAME`; the server owns it from now on.
      open_log: opens the log of a run, given its name.
      journal: path of the journal; None for that of the job.

    Raises:
      LogError: the log can't be continued.
    """
    self._transport, self._open_log = transport, open_log
    self._journal_path = journal
    self._runs: dict[str, _Run] = {}
    # The run that each process has called.
    self._called: dict[str, _Run] = {}
    # Whether a run that has ended was closed.
    self._has_closed = False
    self._warned_at = -_AGAIN
    self.idle_since = time.monotonic()
    self._open("")

  def _open(self, name: str) -> _Run:
    run = self._runs[name] = _Run(name, self._open_log(name))
    self._step(run, inputs.Started())
    return run

  @property
  def clients(self) -> int:
    """How many processes are connected, but for launchers."""
    peers = {*self._transport.peers()}
    for run in self._runs.values():
      peers -= run.core.hosts.launchers
    return len(peers)

  @property
  def begun(self) -> list[Coordinator]:
    """The runs that have begun."""
    cores = [run.core for run in self._runs.values()]
    return [core for core in cores if core.history.job is not None]

  @property
  def is_over(self) -> bool:
    """Whether a run has ended, and no other run goes on."""
    some = self._has_closed or bool(self.begun)
    return some and all(core.is_over for core in self.begun)

  def poll(self, timeout: float) -> None:
    """Handles events, and waits for more if there are none.

    Args:
      timeout: the longest time to wait, in seconds.

    Raises:
      LogError: another coordinator may write the log.
    """
    due = min(run.core.deadline() for run in self._runs.values())
    due -= self._transport.now()
    for event in self._transport.poll(max(0.0, min(timeout, due))):
      self._on_event(event)
    for run in [*self._runs.values()]:
      if run.core.deadline() <= self._transport.now():
        self._step(run, inputs.TimePassed())
        self._close_if_left(run)
    if self.clients:
      self.idle_since = time.monotonic()

  def close(self, reason: str = "the coordinator has ended") -> None:
    """Closes all connections in order."""
    self._transport.close(reason)
    for run in self._runs.values():
      run.close()

  def _on_event(self, event: transports.Event) -> None:
    match event:
      case transports.Message(peer, payload):
        try:
          message = MESSAGES.decode(payload)
        except codec.BadMessage as error:
          run = self._called.get(peer) or self._runs[""]
          text = f"{error} to version {optax_dist.__version__}"
          self._step(run, inputs.Malformed(peer, text))
          return
        if isinstance(message, Hello):
          self._called_by(peer, message.job.run)
        elif isinstance(message, Meet | Host):
          self._called_by(peer, message.run)
        if peer not in self._called:
          return
        run = self._called[peer]
        self._step(run, inputs.Received(peer, message))
        if isinstance(message, Hello):
          self._allow(peer, run)
      case transports.PeerLost(peer, how, reason):
        if peer in self._called:
          run = self._called.pop(peer)
          self._step(run, inputs.PeerLost(peer, how, reason))
          self._close_if_left(run)
      case _:
        pass  # Events of arrays: a coordinator exchanges none.

  def _allow(self, peer: str, run: _Run) -> None:
    """Sets how long a process may be silent, by its run's rule."""
    job = run.core.history.job
    if job is not None:
      rules = job.rules
      silence = deadlines.silence_of_peers(rules.timeout, rules.silence_timeout)
      self._transport.allow(peer, silence)

  def _called_by(self, peer: str, name: str) -> None:
    """Notes which run a process calls, or refuses it if that can't be had."""
    self._called.pop(peer, None)
    try:
      self._called[peer] = self._runs.get(name) or self._open(name)
    except LogError as error:
      refused = Refused(f"its coordinator can't continue: {error}")
      self._transport.send(peer, [MESSAGES.encode(refused)])

  def _close_if_left(self, run: _Run) -> None:
    """Closes an ended run without connected processes; its log has the outcome.

    A coordinator may have thousands of runs, one after another.
    """
    is_left = not (run.goes_on or run in self._called.values())
    if run.name and run.log.is_kept and is_left:
      self._has_closed |= run.core.is_over
      self._runs.pop(run.name).close()

  def _step(self, run: _Run, input_: inputs.Input) -> None:
    for effect in run.core.step(input_, self._transport.now()):
      self._execute(run, effect)

  def _execute(self, run: _Run, effect: fx.Effect) -> None:
    match effect:
      case fx.Append(record):
        wrong = run.log.append(record, run.core.history)
        if wrong and time.monotonic() >= self._warned_at + _AGAIN:
          self._warned_at = time.monotonic()
          _log.warning(
            "The coordinator's log can't be written: %s. The run goes on; if its"
            " coordinator dies now, its replicas bring back what is missing.",
            wrong,
          )
      case fx.Send(peers, message):
        encoded = MESSAGES.encode(message)
        for peer in peers:
          self._transport.send(peer, [encoded])
      case fx.Connect(peer, address):
        # A lost replica, which may be alive and listen at this address.
        self._called[peer] = run
        nonce = run.core.history.nonce.encode()
        self._transport.connect(peer, address, nonce, met=True)
      case fx.Disconnect(peer, reason):
        self._called.pop(peer, None)
        self._transport.disconnect(peer, reason)
      case fx.WriteJournal(note):
        # The file may be slow, and others wait for the step.
        self._transport.flush()
        self._write(run, note)
      case fx.Log(text):
        _log.warning("%s", text)
      case _:
        raise AssertionError(f"a coordinator has no effect {effect!r}")

  def _write(self, run: _Run, note: journal_events.Record) -> None:
    history = run.core.history
    if history.job is None:
      return  # There is no run yet.
    described = self._journal_path or history.job.journal, history.job.about
    if run.described != described:
      if run.journal is not None:
        run.journal.close()  # The run has another job now.
      path, about = run.described = described
      run.journal = None
      if path:
        recent = [journal_events.committed(c) for c in history.recent]
        run.journal = journal_lines.JournalLines(
          path, json.loads(about), recent
        )
    if run.journal is not None:
      run.journal.write(note)


def serve(transport: sockets.Transport, ended: threading.Event) -> None:
  """Runs a coordinator in memory until `ended` is set; for a thread."""
  server = Server(transport, lambda name: Log(None))
  try:
    while not ended.is_set():
      server.poll(_POLL_SECONDS)
  finally:
    server.close()
