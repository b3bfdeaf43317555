"""Nothing outlives a launcher, though it is killed and its replicas hide."""

import os
import subprocess
import sys

import left_over
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


def test_process_in_its_own_group_is_found_by_the_token(made):
  one, start = made
  token = {watcher.TOKEN_VARIABLE: "a token of this test"}
  outer = start([sys.executable, "-S", "-c", _HIDING, *_SLEEP], **token)
  hidden = int(outer.stdout.readline())
  stranger = start(_SLEEP, **{watcher.TOKEN_VARIABLE: "another"})
  one.stop()
  left_over.wait_for_end(outer.pid, hidden)
  assert stranger.poll() is None
  assert one.process.returncode == 0
