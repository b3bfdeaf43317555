"""A launched process: what it says and prints, and that it ends with its kin."""

import os
import select
import signal
import sys
import threading

import left_over
import pytest
from waiting import until

from optax_dist.coordinator.launch import child

_PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
"""


@pytest.mark.parametrize("late", [False, True])
def test_descendants_of_a_child_end_with_it(late):
  wait = "" if late else "time.sleep(300)"
  made = child.Child(
    "one",
    [sys.executable, "-S", "-c", _PARENT + wait],
    echo=lambda *told: None,
  )
  if late:  # It has ended itself, but its group has not.
    until(made.has_ended)
    os.killpg(made.pid, 0)
  made.kill()

  until(lambda: not left_over.has_group(made.pid))


def test_endless_output_does_not_block_the_launcher():
  """The launcher has others to look at, and a Ctrl-C to see."""
  lines = []
  script = "while True: print('again and again')"
  made = child.Child(
    "one",
    [sys.executable, "-S", "-c", script],
    echo=lambda *told: lines.append(told),
  )
  reader = threading.Thread(target=made.read_prints)
  try:
    until(lambda: made.files() and select.select(made.files(), [], [], 1.0)[0])
    reader.start()
    reader.join(30.0)
    in_time = not reader.is_alive()
  finally:
    os.kill(made.pid, signal.SIGKILL)
    reader.join()
    made.kill()
  assert in_time
  assert lines


@pytest.mark.parametrize(
  ("number", "name"), [(signal.SIGHUP, "SIGHUP"), (40, "signal 40")]
)
def test_ending_names_the_signal(number, name):
  made = child.Child("a process", ["sh", "-c", f"kill -{int(number)} $$"])
  made.popen.wait()
  made.kill()
  assert child.ending(made.popen) == f"was ended by {name}"
