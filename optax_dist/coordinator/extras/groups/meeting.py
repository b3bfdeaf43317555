"""How a process of a replica finds the others, through the coordinator.

All processes call the coordinator, process 0 with the address where they meet, which
all of them get once all have called. Until they join the run, each stays connected, and
is notified if a process is lost. Then the other processes end, too, and their launcher
starts them again.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
from collections.abc import Callable
from concurrent import futures
from typing import Any

from optax_dist.coordinator import errors
from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.runtime import caller
from optax_dist.coordinator.runtime import endpoint as endpoints

_log = logging.getLogger("optax_dist.coordinator")
# Seconds to wait for the other processes, and seconds until a warning names them.
MEETING_TIMEOUT, _SAYS_SO = 300.0, 10.0


class Meeting:
  """One process among those of its replica, until it joins."""

  def __init__(
    self,
    endpoint: endpoints.Endpoint,
    call: msg.Meet,
    on_loss: Callable[[str], None],
  ):
    """Calls the coordinator.

    Args:
      endpoint: a transport, which the meeting owns from now on, and the coordinator.
      call: the first message, with this process's index.
      on_loss: called if a process is lost after all had met.
    """
    self._call, self._on_loss = call, on_loss
    self._met: futures.Future[msg.Met] = futures.Future()
    self._missing: tuple[int, ...] | None = None
    self._closed, self._ended = False, ""
    self._caller = caller.Caller(
      endpoint, self._answer, self._hear, self._refuse
    )
    self._caller.start()
    atexit.register(self._end)

  def wait(self, timeout: float = MEETING_TIMEOUT) -> str:
    """Waits for all processes of the replica.

    Args:
      timeout: seconds.

    Returns:
      The address of process 0.

    Raises:
      CoordinatorError: they have not come in time.
      JoinRefused: this one can't take part.
    """
    first = min(timeout, _SAYS_SO)
    if not futures.wait([self._met], first).done:
      _log.warning("%s waits for %s.", self, self._awaited())
      if not futures.wait([self._met], timeout - first).done:
        self.close()
        raise errors.CoordinatorError(
          f"{self} can't begin: It waits for {self._awaited()}, {timeout:.0f} s."
        )
    if self._met.exception() is not None:
      self.close()
    return self._met.result().address

  def close(self) -> None:
    """Ends the meeting once this process joins; the other processes go on."""
    atexit.unregister(self._end)
    self._closed = True
    self._caller.close()

  def _end(self) -> None:
    """Tells the other processes that this program ends, since they wait for it.

    At exit, JAX would have this process wait for them, and abort it when they end. So
    after an error it exits at once, with the exit code of an error.
    """
    error: BaseException | None = getattr(sys, "last_value", None)
    self._ended = "it has not joined the run"
    if error is not None:
      self._ended = f"it has raised {error!r:.200}"
    self._caller.say_again()
    self.close()
    if error is not None and self._has_met:
      logging.shutdown()
      for stream in (sys.stdout, sys.stderr):
        stream.flush()
      os._exit(1)

  def __str__(self) -> str:
    return f"Process {self._call.index} of replica {self._call.replica!r}"

  def _awaited(self) -> str:
    if self._missing is None or self._caller.trouble:
      return (
        f"the coordinator at {self._caller.endpoint.coordinator}"
        f" ({self._caller.trouble})."
        " `optax-dist launch` starts it, or `optax-dist coordinator`"
      )
    some = " and ".join(f"process {index}" for index in self._missing)
    return f"{some} of its replica, on this or another host"

  # In the caller's thread.

  def _answer(self) -> msg.Meet:
    call = codec.replace(self._call, ended=self._ended)
    if not self._has_met:
      return call
    return codec.replace(call, generation=self._met.result().generation)

  @property
  def _has_met(self) -> bool:
    return self._met.done() and self._met.exception() is None

  def _hear(self, message: Any) -> None:
    match message:
      case msg.Awaited(missing):
        self._missing = missing
      case msg.Met():
        if not self._met.done():
          self._met.set_result(message)
      case msg.Parted(reason):
        self._fail(reason, errors.CoordinatorError)

  def _refuse(self, reason: str) -> None:
    text = f"no connection with the coordinator: {reason}"
    self._fail(text, errors.JoinRefused)

  def _fail(self, reason: str, kind: type[errors.CoordinatorError]) -> None:
    if not self._met.done():
      self._met.set_exception(kind(f"{self} can't begin: {reason}"))
    elif not self._closed:
      self._on_loss(f"The replica can't go on: {reason}.")
