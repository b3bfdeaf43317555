"""The launcher's line to the coordinator: reports which replicas may still come.

The coordinator knows only replicas that have joined; launchers report replicas that
ended before. A launcher that is refused ends at once, and a launcher whose coordinator
is gone prints a warning.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterable

from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.launch.placement import Placement
from optax_dist.coordinator.protocol import codec, deadlines
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import Ended
from optax_dist.coordinator.runtime import caller
from optax_dist.coordinator.runtime import endpoint as endpoints

# Seconds without a byte after which the coordinator is lost; and seconds after which to
# warn of a coordinator that was lost, or has not answered yet.
_SILENCE, _GONE, _LATE = 6.0, 2.0, 15.0


class Line:
  """Connects a launcher to the coordinator of its job, whichever that is.

  Attributes:
    refused: why no attempt can help; "" if one may.
    ended: how the run has ended; None if it hasn't.
  """

  def __init__(
    self,
    address: str,
    environment: Environment,
    placement: Placement,
    say: Callable[[str], None],
  ):
    """Calls the coordinator.

    Args:
      address: address of the coordinator, or a URL of etcd.
      environment: the environment of all replicas.
      placement: what runs on this host.
      say: called by `look` with what people must know.

    Raises:
      ValueError: a certificate can't be used.
    """
    assert environment.secret is not None
    self._host = msg.Host(
      environment.run or "",
      placement.rank,
      f"--nodes {placement.hosts} --replicas {placement.replicas}"
      f" --processes-per-replica {placement.processes}",
      f"process {os.getpid()} on {socket.gethostname()}",
      (*placement.here,),
    )
    self._say = say
    self._is_gone = self._was_there = False
    self.refused = ""
    self.ended: Ended | None = None
    # Warnings of the coordinator, as text.
    self._notes: list[str] = []
    made = endpoints.connect(
      address,
      f"launcher-{placement.rank}",
      environment.secret.encode(),
      deadlines.silence_of_peers(10 * _SILENCE, _SILENCE),
      bind="127.0.0.1",  # No process connects to a launcher.
      ports=(0,),
      certificates=environment.find_certificates(),
    )
    self._caller = caller.Caller(
      made, lambda: self._host, self._hear, self._refuse
    )
    self._caller.start()

  def tell(
    self,
    coming: Iterable[int],
    never_joined: Iterable[int],
    ended: Iterable[str],
    given_up: str = "",
  ) -> None:
    """Reports to the coordinator which replicas may come, and which have ended.

    Args:
      coming: replicas that run, or will, and have never joined.
      never_joined: replicas that have ended, and never joined.
      ended: the last process of each replica that has joined and ended.
      given_up: why some that never joined do not start again; "" if they do.
    """
    host = codec.replace(
      self._host,
      coming=tuple(sorted(coming)),
      ended=tuple(sorted(never_joined)),
      given_up=given_up,
      ended_members=tuple(sorted(ended)),
    )
    if host != self._host:
      self._host = host
      self._caller.say_again()

  def look(self) -> None:
    """Prints when the coordinator is gone or back, and its warnings."""
    while self._notes:
      self._say(self._notes.pop(0))
    trouble, since = self._caller.trouble, self._caller.since
    seconds = time.monotonic() - since
    where = f"the coordinator at {self._caller.endpoint.coordinator}"
    late = _GONE if self._was_there else _LATE
    if trouble and not self._is_gone and seconds > late:
      self._is_gone = True
      how = "is gone" if self._was_there else "is not there yet"
      self._say(
        f"{where} {how}: {trouble}. The replicas of this host go on, and wait for it,"
        " each a little longer than the `timeout` of its join (300 s unless it was"
        " given); nothing is lost if it comes back before"
      )
    elif not trouble:
      if self._is_gone:
        self._say(f"{where} is there{' again' if self._was_there else ''}")
      self._is_gone, self._was_there = False, True

  def close(self) -> None:
    """Closes the line after sending pending reports."""
    self._caller.close()

  def _hear(self, message: msg.Message) -> None:
    match message:
      case msg.Stalled():
        self._notes.append(message.missing)
      case Ended():
        self.ended = message

  def _refuse(self, reason: str) -> None:
    self.refused = (
      f"{self._caller.endpoint.coordinator} refuses this launcher: {reason}"
    )
