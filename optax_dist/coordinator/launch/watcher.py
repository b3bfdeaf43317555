"""Ends what a launcher has started, should the launcher be killed.

A program of its own, which needs nothing but Python: `start` starts it. It reads
process groups from its standard input, ``+123`` and ``-123``, and when that
ends, kills the groups, and all else that has the launch's token in its
environment.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

TOKEN_VARIABLE = "OPTAX_DIST_LAUNCH"
_SECONDS = 5.0


class Watcher:
  """The watcher, as its launcher sees it."""

  def __init__(self, token: str):
    """Starts it.

    Args:
      token: what all processes of the launch have as OPTAX_DIST_LAUNCH.
    """
    self.process = subprocess.Popen(
      [sys.executable, "-I", "-S", __file__, token],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      env={},
      start_new_session=True,
    )

  def add(self, group: int) -> None:
    """Names a process group."""
    self._say(f"+{group}\n")

  def remove(self, group: int) -> None:
    """Says that a group has ended: its number may become another's."""
    self._say(f"-{group}\n")

  def stop(self) -> None:
    """Has it do its work, and waits."""
    assert self.process.stdin is not None
    with contextlib.suppress(OSError):
      self.process.stdin.close()
    try:
      self.process.wait(2 * _SECONDS)
    except subprocess.TimeoutExpired:
      self.process.kill()
      self.process.wait()

  def _say(self, line: str) -> None:
    assert self.process.stdin is not None
    with contextlib.suppress(OSError):
      self.process.stdin.write(line.encode())
      self.process.stdin.flush()


def _main(token: str) -> None:
  for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(ignored, signal.SIG_IGN)
  groups = set()
  for line in sys.stdin:
    number = int(line[1:])
    if line[0] == "+":
      groups.add(number)
    else:
      groups.discard(number)
  for group in groups:
    with contextlib.suppress(OSError):
      os.killpg(group, signal.SIGKILL)
  end = time.monotonic() + _SECONDS
  # One that was starting a process when it was killed may have left it.
  while time.monotonic() < end and (left := _with(token)):
    for pid in left:
      with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.02)


def _with(token: str) -> list[int]:
  """Processes with the token in their environment."""
  wanted = f"{TOKEN_VARIABLE}={token}".encode()
  found = []
  with contextlib.suppress(OSError):
    for name in os.listdir("/proc"):
      if not name.isdecimal():
        continue
      with (
        contextlib.suppress(OSError),
        open(f"/proc/{name}/environ", "rb") as f,
      ):
        if wanted in f.read().split(b"\0"):
          found.append(int(name))
  return found


if __name__ == "__main__":
  _main(sys.argv[1])
