"""How a process of a replica finds the others, through the coordinator.

All of them call the coordinator, process 0 with the address where they meet, and
are told it once all have come. Until they join the run, each stays connected, and
is told if one is lost: then the others end, too, and whoever has started them
starts them again.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from typing import Any

from optax_dist.coordinator import errors
from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.runtime import caller, endpoint

_log = logging.getLogger("optax_dist.coordinator")
# Seconds to wait for the other processes, and until it says for whom.
PATIENCE, _SAYS_SO = 300.0, 10.0


class Meeting:
  """One process among those of its replica, until it joins."""

  def __init__(
    self,
    place: endpoint.Endpoint,
    call: msg.Meet,
    on_loss: Callable[[str], None],
  ):
    """Calls the coordinator.

    Args:
      place: a transport, which it owns from now on, and the coordinator.
      call: which process this is.
      on_loss: called if the replica can't go on after all had come.
    """
    self._call, self._on_loss = call, on_loss
    self._changed = threading.Condition()
    self._met: msg.Met | None = None
    self._failure, self._refused = "", False
    self._missing: tuple[int, ...] | None = None
    self._closed = False
    self._caller = caller.Caller(place, self._answer, self._hear, self._refuse)
    self._caller.start()
    atexit.register(self.close)

  def wait(self, timeout: float = PATIENCE) -> str:
    """Waits for all processes of the replica.

    Args:
      timeout: seconds.

    Returns:
      The address of process 0.

    Raises:
      CoordinatorError: they have not come in time.
      JoinRefused: this one can't take part.
    """
    with self._changed:
      ready = lambda: self._met is not None or bool(self._failure)
      if not self._changed.wait_for(ready, min(timeout, _SAYS_SO)):
        _log.warning("%s waits for %s.", self, self._awaited())
        self._changed.wait_for(ready, timeout - _SAYS_SO)
      if self._met is not None:
        return self._met.address
      why = self._failure or f"It waits for {self._awaited()}, {timeout:.0f} s."
    self.close()
    kind = errors.JoinRefused if self._refused else errors.CoordinatorError
    raise kind(f"{self} can't begin: {why}")

  def close(self) -> None:
    """Parts without ending the others; once this process joins, or ends."""
    atexit.unregister(self.close)
    self._closed = True
    self._caller.close()

  def __str__(self) -> str:
    return f"Process {self._call.index} of replica {self._call.replica!r}"

  def _awaited(self) -> str:
    if self._missing is None or self._caller.trouble:
      return (
        f"the coordinator at {self._caller.place.coordinator}"
        f" ({self._caller.trouble})."
        " `optax-dist launch` starts it, or `optax-dist coordinator`"
      )
    some = " and ".join(f"process {index}" for index in self._missing)
    return f"{some} of its replica, on this or another host"

  # In the caller's thread.

  def _answer(self) -> msg.Meet:
    generation = "" if self._met is None else self._met.generation
    return codec.replace(self._call, generation=generation)

  def _hear(self, message: Any) -> None:
    match message:
      case msg.Awaited(missing):
        self._missing = missing
      case msg.Met():
        with self._changed:
          self._met = message
          self._changed.notify_all()
      case msg.Parted(reason):
        self._fail(reason)

  def _refuse(self, reason: str) -> None:
    self._refused = True
    self._fail(f"no connection with the coordinator: {reason}")

  def _fail(self, reason: str) -> None:
    with self._changed:
      self._failure = reason
      self._changed.notify_all()
    if self._met is not None and not self._closed:
      self._on_loss(f"The replica can't go on: {reason}.")
