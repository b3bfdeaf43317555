"""The launcher's view of a launched process; see `channel` for its own side."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import pathlib
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import IO

from optax_dist.coordinator.launch import channel, output
from optax_dist.coordinator.launch.channel import Event
from optax_dist.coordinator.launch.environment import inherited, variable

# How many blocks of a process's output are read at once, and after its end: more than
# a pipe can hold.
_IN_A_ROW, _ALL = 4, 64


class Child:
  """A process in its own process group, with a channel to it.

  Attributes:
    name: for messages.
    popen: the process.
    printed: receives its output.
    parted: whether it has said that its part in a run has ended, not by its doing.
    ended_at: when it was known to have ended; infinite before.
  """

  def __init__(
    self,
    name: str,
    command: Sequence[str],
    *,
    env: Mapping[str, str] | None = None,
    folder: pathlib.Path | None = None,
    echo: output.Echo = output.echo,
  ):
    """Starts the process.

    Args:
      name: for messages, and for the file of its output.
      command: the program; if it creates a `Channel`, or calls
        `coordinator.join`, it can send messages to its launcher.
      env: variables to add to this process's own, but for those of a job.
      folder: where the file of its output goes; None for no file.
      echo: called with each line of it.

    Raises:
      OSError: it can't be started.
    """
    self._folder, self._echo = folder, echo
    self._label(name)
    self._socket, theirs = socket.socketpair()
    self._socket.setblocking(False)
    with theirs:
      self.popen = subprocess.Popen(
        list(command),
        env={
          **inherited(),
          **(env or {}),
          variable("channel"): str(theirs.fileno()),
        },
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[theirs.fileno()],
        start_new_session=True,  # Ctrl-C is handled by the launcher.
      )
    for stream in self._streams():
      os.set_blocking(stream.fileno(), False)
    self._rest = b""
    self.parted, self.ended_at = False, math.inf

  @property
  def pid(self) -> int:
    """The process id, which is also that of its group."""
    return self.popen.pid

  def files(self) -> list[int]:
    """All descriptors to wait for: messages and output."""
    numbers = [self._socket.fileno(), *(s.fileno() for s in self._streams())]
    return [number for number in numbers if number >= 0]

  def read(self) -> list[Event]:
    """Returns new messages; none once the channel has ended."""
    try:
      while more := self._socket.recv(1 << 16):
        self._rest += more
      self._socket.close()
    except BlockingIOError:
      pass
    except OSError:
      self._socket.close()
    *lines, self._rest = self._rest.split(b"\n")
    events = []
    for line in lines:
      with contextlib.suppress(ValueError):
        event = json.loads(line)
        if isinstance(event, dict):
          events.append(event)
    return events

  def rename(self, name: str) -> None:
    """Has its output labelled by another name from now on."""
    self.printed.end()
    self._label(name)

  def _label(self, name: str) -> None:
    self.name = name
    self.printed = output.OutputRelay(
      name, folder=self._folder, echo=self._echo
    )

  def tell(self, event: str, **fields: object) -> None:
    """Sends it a message; no effect if it has ended, or does not read."""
    with contextlib.suppress(OSError):
      self._socket.send(channel.encode(event, fields))

  def read_prints(self, most: int = _IN_A_ROW) -> None:
    """Passes on new output.

    Args:
      most: blocks to read from each stream; a process that prints faster than
        the launcher reads would otherwise block it.
    """
    for stream in self._streams():
      error = stream is self.popen.stderr
      with contextlib.suppress(BlockingIOError):
        for _ in range(most):
          more = os.read(stream.fileno(), 1 << 16)
          if not more:
            stream.close()
            break
          self.printed.take(more, error)

  def has_ended(self) -> bool:
    """Whether the process has ended; its group may live on until `kill`."""
    if self.popen.returncode is not None:
      return True
    how = os.WEXITED | os.WNOHANG | os.WNOWAIT
    return os.waitid(os.P_PID, self.pid, how) is not None

  def signal(self, number: int) -> None:
    """Sends it a signal; no effect if it has ended."""
    # Its id can't be reused until it was waited for.
    if self.popen.returncode is None:
      os.kill(self.pid, number)

  def kill(self) -> None:
    """Kills it, with all processes that it started."""
    if self.popen.returncode is None:
      with contextlib.suppress(ProcessLookupError):
        os.killpg(self.pid, signal.SIGKILL)
      self.popen.wait()
      self.ended_at = time.monotonic()
    self.read_prints(_ALL)
    self.printed.end()
    for stream in self._streams():
      stream.close()
    self._socket.close()

  def _streams(self) -> list[IO[bytes]]:
    both = (self.popen.stdout, self.popen.stderr)
    return [s for s in both if s is not None and not s.closed]


@dataclasses.dataclass(frozen=True)
class Setup:
  """What the processes of one launcher have in common.

  Attributes:
    env: variables to add to this process's own.
    folder: where the files of their output go; None for no files.
    echo: called with each line of it.
  """

  env: Mapping[str, str]
  folder: pathlib.Path | None
  echo: output.Echo

  def start(
    self, name: str, command: Sequence[str], variables: Mapping[str, str]
  ) -> Child:
    """Starts a process, with more variables of its own; see `Child`."""
    env = {**self.env, **variables}
    return Child(name, command, env=env, folder=self.folder, echo=self.echo)


def ending(process: subprocess.Popen) -> str:
  """A description of how a process ended."""
  code = process.poll()
  if code is None:
    return "still runs"
  if code < 0:
    name = f"signal {-code}"  # Real-time signals have no names.
    with contextlib.suppress(ValueError):
      name = signal.Signals(-code).name
    return f"was ended by {name}"
  return f"ended with exit code {code}"
