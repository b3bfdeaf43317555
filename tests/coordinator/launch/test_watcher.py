"""Nothing outlives a launcher, though it is killed and its replicas hide."""

import os
import pathlib
import subprocess
import sys
import time

import pytest

from optax_dist.coordinator.launch import watcher

_SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(300)"]
# Starts another process in a separate session, and prints its id.
_HIDING = """
import subprocess, sys, time
made = subprocess.Popen(sys.argv[1:], start_new_session=True)
print(made.pid, flush=True)
time.sleep(300)
"""


def _gone(pid, within=60.0):
  end = time.monotonic() + within
  while time.monotonic() < end:
    try:
      stat = pathlib.Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
      return True
    if stat.rpartition(")")[2].split()[0] == "Z":
      return True
    time.sleep(0.02)
  return False


@pytest.fixture
def made():
  """A watcher; what `start` starts is ended at last."""
  processes = []

  def start(command, **env):
    process = subprocess.Popen(
      command,
      env=os.environ | env,
      stdout=subprocess.PIPE,
      start_new_session=True,
    )
    processes.append(process)
    return process

  one = watcher.Watcher("a token of this test")
  yield one, start
  one.stop()
  for process in processes:
    process.kill()
    process.wait()
    process.stdout.close()


def test_groups_that_are_named_end_with_the_pipe(made):
  one, start = made
  named, other, removed = (start(_SLEEP) for _ in range(3))
  for process in (named, removed):
    one.add(process.pid)
  one.remove(removed.pid)
  one.stop()
  assert _gone(named.pid)
  assert other.poll() is None
  assert removed.poll() is None
  assert one.process.returncode == 0


def test_who_has_left_the_group_is_found_by_the_token(made):
  one, start = made
  token = {watcher.TOKEN_VARIABLE: "a token of this test"}
  outer = start([sys.executable, "-S", "-c", _HIDING, *_SLEEP], **token)
  hidden = int(outer.stdout.readline())
  stranger = start(_SLEEP, **{watcher.TOKEN_VARIABLE: "another"})
  one.stop()
  assert _gone(outer.pid)
  assert _gone(hidden)
  assert stranger.poll() is None
