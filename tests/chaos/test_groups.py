"""Replicas of several processes, killed one after another."""

import json

import pytest

from tests.chaos import __main__ as command


@pytest.mark.nightly  # tests/coordinator/runs/test_groups.py has one kill.
def test_processes_are_killed_one_after_another_in_one_run(tmp_path, capsys):
  code = command.main(
    [
      *("--processes-per-replica", "2", "--seeds", "13:15"),
      *("--output", str(tmp_path / "kept")),
    ]
  )
  out = capsys.readouterr().out
  assert code == 0, out
  assert "seed 13, reduce_scatter/kill/1.1" in out
  assert "seed 14, gather/kill/0.0" in out
  assert "2 of 2 kills went well" in out
  kept = (
    (tmp_path / "kept" / "run-1" / "journal.jsonl").read_text().splitlines()
  )
  commits = [r for r in map(json.loads, kept) if r["kind"] == "commit"]
  members = {tuple(m["replica"] for m in r["members"]) for r in commits}
  # Each was alone while the other one came back.
  assert members == {(0,), (1,), (0, 1)}
