"""A launched process: what it says and prints, and that it ends with its kin."""

import os
import select
import signal
import sys
import threading

import left_over
import pytest
from waiting import until

from optax_dist.coordinator.launch import child, output

_SPEAKING = """
import os, socket, sys, json
line = socket.socket(fileno=int(os.environ["OPTAX_DIST_CHANNEL"]))
line.sendall(b'{"event": "hello"}\\nnonsense\\n[1]\\n')
told = json.loads(line.recv(1000))
print("told", told["x"])
print("to err", file=sys.stderr)
sys.exit(5)
"""
# Its stacks come a while after they were asked for.
_BUSY = """
import signal, time
def tell(*_):
  time.sleep(0.6)
  print("in a loop", flush=True)
signal.signal(signal.SIGUSR1, tell)
print("ready", flush=True)
time.sleep(300)
"""
_PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(300)"])
"""


def test_what_it_says_and_prints(tmp_path):
  lines, events = [], []
  printed = output.Printed("one", echo=lambda *told: lines.append(told[1:]))
  made = child.Child(
    "one", [sys.executable, "-S", "-c", _SPEAKING], printed=printed
  )
  try:
    until(lambda: events.extend(made.read()[0]) or events)
    made.send({"x": 7})
    until(made.has_ended)
  finally:
    made.kill()
  assert events == [{"event": "hello"}]
  assert sorted(lines) == [("to err", True), ("told 7", False)]
  assert made.ending() == "ended with exit code 5"
  assert "told 7" in made.tail()
  made.signal(signal.SIGTERM)  # In vain.
  made.send({"x": 8})


def test_its_log_is_a_file(tmp_path):
  log = tmp_path / "log"
  made = child.Child("one", [sys.executable, "-S", "-c", "print('x')"], log)
  until(made.has_ended)
  made.kill()
  assert made.tail() == log.read_text().strip() == "x"


def test_what_an_earlier_one_printed_is_kept(tmp_path):
  log = tmp_path / "log"
  for words in ("why it failed", "well"):
    print_it = [sys.executable, "-S", "-c", f"print({words!r})"]
    made = child.Child("one", print_it, log)
    until(made.has_ended)
    made.kill()
    # Its last words are its own.
    assert made.tail() == words
  assert log.read_text().split("\n") == ["why it failed", "well", ""]


def test_where_a_process_is_that_the_machine_lets_wait(tmp_path):
  log = tmp_path / "log"
  made = child.Child("one", [sys.executable, "-S", "-c", _BUSY], log)
  try:
    until(lambda: "ready" in log.read_text())
    assert made.where() == "in a loop\n"
  finally:
    made.kill()
  # One that has ended says no more.
  assert made.where() == ""


@pytest.mark.parametrize("late", [False, True])
def test_what_it_has_started_ends_with_it(late):
  wait = "" if late else "time.sleep(300)"
  made = child.Child(
    "one",
    [sys.executable, "-S", "-c", _PARENT + wait],
    printed=output.Printed("one", echo=lambda *told: None),
  )
  if late:  # It has ended itself, but its group has not.
    until(made.has_ended)
    os.killpg(made.pid, 0)
  made.kill()

  until(lambda: not left_over.has_group(made.pid))


def test_one_that_prints_without_end_leaves_time_for_others():
  """The launcher has others to look at, and a Ctrl-C to see."""
  lines = []
  printed = output.Printed("one", echo=lambda *told: lines.append(told))
  script = "while True: print('again and again')"
  made = child.Child(
    "one", [sys.executable, "-S", "-c", script], printed=printed
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
