"""Replicas of several processes, killed one after another."""

import pathlib
import subprocess
import sys

import pytest

from tests.chaos.members import read_journal


@pytest.mark.nightly  # tests/coordinator/runs/test_groups.py has one kill.
def test_processes_are_killed_one_after_another_in_one_run(tmp_path):
  command = [sys.executable, "-m", "tests.chaos", "--output", str(tmp_path)]
  done = subprocess.run(
    [*command, "--processes-per-replica", "2", "--seeds", "22,31,40"],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  assert "seed 22, reduce_scatter/process/0.1" in done.stdout
  assert "seed 31, gather/coordinator/0.1" in done.stdout
  assert "seed 40, done/process/1.0" in done.stdout
  assert "3 of 3 kills went well" in done.stdout
  result, _ = read_journal(tmp_path / "run-1" / "journal.jsonl")
  commits = [r for r in result if r["kind"] == "commit"]
  members = {tuple(m["replica"] for m in r["members"]) for r in commits}
  # Each was alone while the other one came back.
  assert members == {(0,), (1,), (0, 1)}
