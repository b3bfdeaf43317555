"""Kills the processes of a launcher, should the launcher be killed.

A separate program, which needs only Python. When its standard input ends, it
kills all processes with the launch's token in their environment.
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
  """The launcher's view of the watcher."""

  def __init__(self, token: str, keeps: int | None = None):
    """Starts the watcher.

    Args:
      token: the value of OPTAX_DIST_LAUNCH in all processes of the launch.
      keeps: the file of a lock of the launcher, which is then free only once the
        watcher has ended, too.
    """
    self.process = subprocess.Popen(
      [sys.executable, "-I", "-S", __file__, token],
      stdin=subprocess.PIPE,
      stdout=subprocess.DEVNULL,
      env={},
      start_new_session=True,
      pass_fds=() if keeps is None else (keeps,),
    )

  def stop(self) -> None:
    """Makes it kill the processes, and waits."""
    assert self.process.stdin is not None
    with contextlib.suppress(OSError):
      self.process.stdin.close()
    try:
      self.process.wait(2 * _SECONDS)
    except subprocess.TimeoutExpired:
      self.process.kill()
      self.process.wait()


def _main(token: str) -> None:
  for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(ignored, signal.SIG_IGN)
  sys.stdin.read()
  end = time.monotonic() + _SECONDS
  # Again, since one that was just forking may have left a child.
  while time.monotonic() < end and (left := having(token)):
    for pid in left:
      with contextlib.suppress(OSError):
        os.kill(pid, signal.SIGKILL)
    time.sleep(0.02)


def having(token: str) -> list[int]:
  """The processes that started with this token in their environment."""
  wanted = f"{TOKEN_VARIABLE}={token}".encode()
  pids = []
  with contextlib.suppress(OSError):
    for name in os.listdir("/proc"):
      if not name.isdecimal():
        continue
      with (
        contextlib.suppress(OSError),
        open(f"/proc/{name}/environ", "rb") as f,
      ):
        if wanted in f.read().split(b"\0"):
          pids.append(int(name))
  return pids


if __name__ == "__main__":
  _main(sys.argv[1])
