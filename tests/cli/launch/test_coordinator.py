"""The coordinator's process as a victim, and by itself, at the front door."""

import contextlib
import os
import pathlib
import re
import signal
import socket

import commands
import left_over
import pytest
import run_journals
import waiting

from optax_dist.cli import main
from optax_dist.coordinator import journal
from optax_dist.coordinator.transport import addresses

_TRAIN = """
import sys, time, jax.numpy as jnp, optax
from optax_dist import coordinator
with coordinator.join(optax.sgd(0.5), jnp.zeros(2)) as replica:
  while replica.global_step < int(sys.argv[1]) and not replica.finished:
    replica.step(jnp.ones(2))
    time.sleep(0.02)
    if replica.global_step % 20 == 0:
      print("step", replica.global_step, flush=True)
  replica.finish()
  print("ends at", replica.global_step, replica.fingerprint(), flush=True)
"""


@pytest.fixture
def start(tmp_path):
  (tmp_path / "train.py").write_text(_TRAIN)
  with commands.starting(tmp_path) as begin:
    yield begin


def _coordinator(launcher):
  """The process that coordinates for a launcher at present; None if none does."""
  for pid, command in left_over.started_by(launcher.pid).items():
    if "optax_dist.coordinator.server" in command:
      return pid
  return None


def _command_lines(pid):
  """The command lines of all descendants of a process."""
  result = []
  for child, command in left_over.started_by(pid).items():
    result += [command, *_command_lines(child)]
  return result


def _steps(text):
  return max(map(int, re.findall(r"step (\d+)", text())), default=0)


def _check_journal(path, steps):
  """Each step is there once, in order."""
  commits = [
    line["step"]
    for line in run_journals.whole(path)
    if line["kind"] == "commit"
  ]
  assert commits == list(range(commits[0], commits[0] + len(commits)))
  assert commits[0] in (0, 1)
  assert len(commits) == steps


def test_killed_or_hanging_coordinator_is_restarted(start, tmp_path):
  """Twice killed and once stopped: no step is lost, and none counts twice."""
  output, steps = tmp_path / "out", 250
  launcher, text = start(
    *("launch", "--replicas", 2, "--output", output, "train.py", steps)
  )
  before = None
  for number in (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP):
    others = (None, before)
    victim = waiting.until(
      lambda others=others: (
        (pid := _coordinator(launcher)) not in others and pid
      ),
      text,
    )
    reached = _steps(text)
    waiting.until(lambda low=reached: _steps(text) > low, text)
    os.kill(victim, number)
    before = victim
  assert launcher.wait(180.0) == 0, text()
  assert text().count("was ended by SIGKILL; it starts again") == 2
  assert text().count("has not answered for 5 s, and is replaced") == 1
  ends = re.findall(r"ends at (\d+) (\w+)", text())
  assert ends == [(str(steps), ends[0][1])] * 2
  _check_journal(output / "journal.jsonl", steps)


def test_log_and_journal_deleted_during_a_run_are_rewritten(start, tmp_path):
  """The log with all that it said, so a coordinator that is killed goes on."""
  output, steps = tmp_path / "out", 400
  launcher, text = start(
    *("launch", "--replicas", 2, "--output", output, "train.py", steps)
  )
  waiting.until(lambda: _steps(text) > 0, text, 180.0)
  log = output / "coordinator.log"
  for path in (log, output / "journal.jsonl"):
    path.unlink()
  waiting.until(log.exists, text, 180.0)
  os.kill(_coordinator(launcher), signal.SIGKILL)
  assert launcher.wait(180.0) == 0, text()
  for what in ("deleted, moved or changed", "deleted, moved or emptied"):
    assert what in text()
  assert [int(n) for n, _ in re.findall(r"ends at (\d+) (\w+)", text())] == [
    steps
  ] * 2
  first, *others = run_journals.whole(output / "journal.jsonl")
  commits = [line["step"] for line in others if line["kind"] == "commit"]
  assert commits == list(range(first["step"], steps))
  # No replica had to join again.
  assert not [line for line in others if line["kind"] == "lost"]


def test_a_log_that_is_a_pipe_is_named_at_once(start, tmp_path):
  os.mkfifo(tmp_path / "coordinator.log")
  own, text = start(
    "coordinator", "--address", "127.0.0.1:9", "--output", tmp_path
  )
  assert own.wait(60.0) == 1
  path = tmp_path / "coordinator.log"
  assert f"The log {path} can't be written: " in text()
  assert "It is no regular file" in text()


def test_coordinator_whose_port_is_taken_reports_it_once(start, tmp_path):
  """It is tried again until the port is free, and the run goes on."""
  (port,) = addresses.free_ports()
  launcher, text = start(
    *("launch", "--replicas", 1, "--address", f"127.0.0.1:{port}"),
    *("--nodes", 1, "--node-rank", 0, "train.py", 100),
  )
  waiting.until(lambda: _steps(text) > 0, text, 180.0)
  victim = _coordinator(launcher)
  os.kill(launcher.pid, signal.SIGSTOP)
  os.kill(victim, signal.SIGKILL)

  def take():
    with contextlib.suppress(OSError):  # It has not ended yet.
      return socket.create_server(("127.0.0.1", port))

  with waiting.until(take):
    os.kill(launcher.pid, signal.SIGCONT)
    seen = {victim, None}
    waiting.until(lambda: seen.add(_coordinator(launcher)) or len(seen) > 4)
  assert launcher.wait(180.0) == 0, text()
  assert text().count("The coordinator ends: ") == 1
  assert "ends at 100 " in text()


def test_standalone_coordinator_continues_with_its_log(start, tmp_path):
  address = f"127.0.0.1:{addresses.free_ports()[0]}"
  command = ("coordinator", "--address", address, "--output", tmp_path / "own")
  first, _ = start(*command)
  launcher, text = start(
    *("launch", "--replicas", 2, "--no-coordinator", "--address", address),
    *("--nodes", 1, "--node-rank", 0, "train.py", 100),
  )
  waiting.until(lambda: _steps(text) > 0, text, 180.0)
  first.kill()
  first.wait()
  second, said = start(*command)
  assert launcher.wait(180.0) == 0, text()
  assert text().count("ends at 100 ") == 2
  second.terminate()
  assert second.wait(60.0) == 0, said()


def test_journal_is_on_the_host_of_the_coordinator(start, tmp_path, capsys):
  """Another host, which shares no folder with it, says where it is."""
  (port,) = addresses.free_ports()
  both = [
    start(
      *("launch", "--nodes", 2, "--node-rank", rank),
      *("--address", f"127.0.0.1:{port}", "--replicas", 2),
      *("--output", tmp_path / f"host{rank}", "train.py", 20),
    )
    for rank in (1, 0)
  ]
  for launched, printed in both:
    assert launched.wait(300) == 0, printed()
  journals = [tmp_path / f"host{rank}" / "journal.jsonl" for rank in (0, 1)]
  records = journal.read(journals[0]).records
  assert [r["kind"] for r in records].count("commit") == 20
  assert not journals[1].stat().st_size
  assert main.main(["watch", "--once", str(journals[1])]) == 0
  assert f"of its coordinator, 127.0.0.1:{port}" in capsys.readouterr().out


def test_neither_command_lines_nor_output_show_a_password(start):
  url = f"etcd://me:hidden@127.0.0.1:{addresses.free_ports()[0]}"
  launcher, text = start(
    *("launch", "--replicas", 1, "--", "sleep", 600), OPTAX_DIST_STORE=url
  )
  waiting.until(lambda: "It waits for etcd" in text(), text)
  waiting.until(lambda: len(_command_lines(launcher.pid)) >= 2, text)
  own = pathlib.Path(f"/proc/{launcher.pid}/cmdline").read_text()
  assert "hidden" not in "".join([text(), own, *_command_lines(launcher.pid)])
