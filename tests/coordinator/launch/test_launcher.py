"""The launcher looks after real processes, and leaves none behind."""

import contextlib
import errno
import os
import pathlib
import resource
import sys

import left_over
import pytest

from optax_dist.coordinator import journal
from optax_dist.coordinator.launch import (
  child,
  environment,
  launcher,
  placement,
  supervisor,
)
from optax_dist.coordinator.launch.launcher import LaunchError

_PROGRAM = str(pathlib.Path(__file__).with_name("launched.py"))


def _launcher(folder, what, hear=lambda line: None, restarts=0, **options):
  """A launcher of two replicas; `hear` gets what they and it print."""
  return launcher.Launcher(
    [sys.executable, _PROGRAM, *what.split()],
    placement.Placement(2),
    supervisor.Policy(restarts=restarts),
    folder=folder,
    env={"JAX_PLATFORMS": "cpu"},
    echo=lambda label, line, error: hear(line),
    **options,
  )


def test_standby_replaces_a_replica_that_dies(
  tmp_path,
):
  lines = []
  made = _launcher(
    tmp_path, f"stand-by {tmp_path}", lines.append, restarts=1, standbys=1
  )
  assert made.run() == 0
  placed = [line.split()[1:] for line in lines if line.startswith("placed")]
  # The one without a number became replica 1; none was started in its place,
  # unless it stood by after that.
  assert sorted(p[0] for p in placed)[:2] == ["0", "1"]
  first = next(p for p in placed if p[0] == "None")
  joined = [line.split()[1:] for line in lines if line.startswith("joined")]
  assert joined[2:] == [["1", first[2]]]
  log = (tmp_path / "replica-1.log").read_text()
  assert log.count("--- replica 1, started") == 2
  assert f"joined 1 {first[2]}" in log
  assert not any("is not replaced" in line for line in lines)


def test_run_does_not_wait_for_a_replica_that_died_with_the_coordinator(
  tmp_path, monkeypatch
):
  """Its launcher has seen its end, and tells the next coordinator."""
  temporary = tmp_path / "temporary"
  monkeypatch.setenv("TMPDIR", str(temporary))
  path = tmp_path / "run.jsonl"
  settings = environment.Environment(journal=str(path))
  assert _launcher(tmp_path, "both-die", environment=settings).run() == 0
  records = journal.read(path).records
  lost = [r for r in records if r["kind"] == "lost"]
  assert [(r["replica"], r["step"]) for r in lost] == [(1, 4)]
  # It has the log, though no folder was chosen for it.
  epochs = [r["epoch"] for r in records if r["kind"] == "coordinator"]
  assert epochs == [1]
  assert lost[0]["reason"] == "its process has ended"
  assert [*temporary.iterdir()]
  assert not [*temporary.rglob("*.log*")]


def test_a_standby_that_ends_is_named_and_not_replaced(tmp_path):
  lines = []

  def hear(line):
    lines.append(line)
    if "standby" in line:
      (tmp_path / "said").touch()

  made = _launcher(tmp_path, f"end-if-standby {tmp_path}", hear, standbys=1)
  assert made.run() == 0
  said = [line for line in lines if "standby" in line]
  assert said == ["a standby ended with exit code 3, and is not replaced"]


def test_standbys_start_one_after_another(tmp_path):
  lines = []
  what = f"stand-by-in-turn {tmp_path}"
  assert _launcher(tmp_path, what, lines.append, standbys=3).run() == 0
  assert not any("is not replaced" in line for line in lines), lines


def test_a_run_whose_parameters_are_lost_begins_again(tmp_path):
  """No other replica had joined when the only member was killed."""
  lines = []
  made = _launcher(tmp_path, f"alone {tmp_path}", lines.append, restarts=1)
  assert made.run() == 0
  assert any("the run begins again from step 0" in line for line in lines)
  assert "replica 1 starts again (restart 1 of 1)" in lines


def test_a_process_that_can_not_be_started_is_named(tmp_path, monkeypatch):
  made, start = [], child.Child

  def start_one(name, *arguments, **options):
    if name == "replica 1":
      raise OSError(errno.EMFILE, "Too many open files")
    made.append(start(name, *arguments, **options))
    return made[-1]

  monkeypatch.setattr(child, "Child", start_one)
  # No coordinator is needed: it is never asked.
  settings = environment.Environment(store="etcd://127.0.0.1:1")
  with pytest.raises(LaunchError, match="Too many open") as caught:
    _launcher(tmp_path, "sleep", environment=settings).run()
  assert str(caught.value).startswith("replica 1 can't be started")
  assert "ulimit -n" in str(caught.value)
  for process in made:
    left_over.wait_for_end(process.pid)


def test_replicas_keep_freed_memory_unless_configured_otherwise(
  tmp_path, monkeypatch
):
  monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "77")
  lines = []
  _launcher(tmp_path, "malloc", lines.append).run()
  printed = [line for line in lines if line.startswith("malloc")]
  threshold = "MALLOC_MMAP_THRESHOLD_=67108864"
  assert printed == [f"malloc {threshold} MALLOC_TRIM_THRESHOLD_=77"] * 2


def test_a_host_may_have_hundreds_of_processes(tmp_path):
  """Each has four descriptors or so; `select` takes numbers up to 1023."""
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  wanted = 2000
  if hard != resource.RLIM_INFINITY and hard < wanted:
    pytest.skip(f"needs {wanted} descriptors")
  with contextlib.ExitStack() as stack:
    stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    for _ in range(1024):
      stack.enter_context(open(os.devnull))
    made = launcher.Launcher(
      [sys.executable, "-c", "pass"],
      placement.Placement(2),
      supervisor.Policy(),
      folder=tmp_path,
    )
    # As they should: nobody has joined.
    with pytest.raises(LaunchError, match="no replica has joined"):
      made.run()
