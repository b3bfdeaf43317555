"""A replica that is stuck says where, and `optax-dist launch` starts it again."""

import pathlib

import run_journals

from optax_dist.cli import main
from optax_dist.coordinator.launch import supervisor
from optax_dist.coordinator.runtime import process_exit

_PROGRAM = str(pathlib.Path(__file__).with_name("stuck_replica.py"))


def test_stuck_replica_is_restarted(tmp_path, capfd, monkeypatch):
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  output = tmp_path / "out"
  # A step takes both replicas, so the second has to come back.
  flags = ("--replicas", "2", "--restarts", "2", "--step-timeout", "4")
  assert main.main(["launch", *flags, "--output", str(output), _PROGRAM]) == 0
  printed = capfd.readouterr().err
  assert "in blocked_data_loader" in printed
  assert "[replica 1]" in printed
  records = run_journals.whole(output / "journal.jsonl")
  (stuck,) = [r for r in records if r["kind"] == "stuck"]
  assert (stuck["replica"], stuck["step"]) == (1, 5)
  assert "in blocked_data_loader" in stuck["stacks"]
  (lost,) = [r for r in records if r["kind"] == "lost"]
  assert lost["reason"].startswith("stuck: its step has taken")
  commits = [r for r in records if r["kind"] == "commit"]
  assert len(commits) == 10
  assert all(len(commit["members"]) == 2 for commit in commits)


def test_replica_stuck_after_the_end_of_the_run_is_named_and_killed(
  tmp_path, capfd, monkeypatch
):
  """Otherwise its launcher would wait for it for ever, with all hosts."""
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")
  monkeypatch.setattr(supervisor, "_USUALLY_ENDED", 1.0)
  flags = ("--replicas", "2", "--replicas-to-aggregate", "1")
  program = (_PROGRAM, str(tmp_path / "blocked"))
  code = main.main(["launch", *flags, "--step-timeout", "6", *program])
  printed = capfd.readouterr().err
  assert code == process_exit.EXIT_CODE
  assert "the run has ended 1 s ago, and replica 1 goes on" in printed
  assert "in blocked_data_loader" in printed
