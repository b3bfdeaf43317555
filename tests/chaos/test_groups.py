"""Replicas of several processes, killed one after another."""

import collections
import json
import os
import types

import descriptors
import pytest

from tests.chaos import __main__ as command
from tests.chaos import group_run, groups


def test_messages_are_read_from_descriptors_with_large_numbers(tmp_path):
  made = groups.Groups(tmp_path)
  read, write = os.pipe()
  os.write(write, b"{}")
  with descriptors.high(read) as number:
    one = types.SimpleNamespace(
      pid=1,
      fileno=lambda: number,
      read=lambda: ([{"event": "step", "step": 3, "print": "a"}], False),
    )
    made.everyone = [groups.Process(one, 0, 0, 0)]
    made._look()
  assert made.everyone[0].step == 3
  os.close(read)
  os.close(write)


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
  kept = (tmp_path / "kept" / "run-1.jsonl").read_text().splitlines()
  commits = [r for r in map(json.loads, kept) if r["kind"] == "commit"]
  members = {tuple(m["replica"] for m in r["members"]) for r in commits}
  # Each was alone while the other one came back.
  assert members == {(0,), (1,), (0, 1)}


def test_a_phase_that_never_comes_is_reported(tmp_path, monkeypatch):
  """A replica that has no processes never begins."""
  monkeypatch.setattr(groups.Groups, "start", lambda *told: [])
  with group_run.Strikes(tmp_path, 2, deadline=0.1) as strikes:
    monkeypatch.setattr(
      strikes,
      "_wait_for_both",
      lambda run, after, what: run.wait(lambda: False, what, 0.1),
    )
    result = strikes.strike(group_run.case(2, 2))
  assert not result.struck
  assert "the replicas do not begin in 0.1 s" in result.problems[0]
  assert strikes.left() == []


@pytest.mark.parametrize("processes", [2, 3])
def test_seeds_in_a_row_kill_each_process_in_each_phase_that_it_enters(
  processes,
):
  cells = group_run.cells(processes)
  cases = [group_run.case(seed, processes) for seed in range(len(cells))]
  assert len(set(map(str, cases))) == len(cells)
  ranks = collections.defaultdict(set)
  for case in cases:
    ranks[case.phase].add(case.rank)
  alone = {"committing", "joining"}
  assert ranks == {
    phase: {0} if phase in alone else set(range(processes))
    for phase in group_run.PHASES
  }
  assert "serving" not in ranks
