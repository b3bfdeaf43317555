"""The fault matrix of replicas that have several processes."""

import collections
import json

import pytest

from optax_dist.cli import main
from optax_dist.cli.chaos import group_cases, group_run, groups


@pytest.mark.parametrize("processes", [2, 3])
def test_seeds_in_a_row_are_the_whole_matrix(processes):
  cells = group_cases.cells(processes)
  cases = [group_cases.case(seed, processes) for seed in range(len(cells))]
  assert len(set(map(str, cases))) == len(cells)
  # Each process, in each phase that it comes to.
  found = collections.Counter(c.who for c in cases)
  assert len(found) == 2 * processes
  assert found["0.1"] == found["1.1"] == len(group_cases.PHASES) - 2


def test_processes_are_killed_and_the_table_is_printed(tmp_path, capsys):
  report = tmp_path / "report.json"
  code = main.main(
    [
      *("chaos", "--processes-per-replica", "2", "--seeds", "13:15"),
      *("--json", str(report), "--output", str(tmp_path / "kept")),
    ]
  )
  out = capsys.readouterr().out
  assert code == 0, out
  rows = json.loads(report.read_text())
  assert [(r["phase"], r["who"]) for r in rows] == [
    ("reduce_scatter", "1.1"),
    ("gather", "0.0"),
  ]
  assert all(r["outcome"] == "ok" for r in rows)
  assert "2 ok, 0 hangs, 0 wrong, 0 not struck" in out
  kept = (tmp_path / "kept" / "run-1.jsonl").read_text().splitlines()
  commits = [r for r in map(json.loads, kept) if r["kind"] == "commit"]
  members = {tuple(m["replica"] for m in r["members"]) for r in commits}
  # Each was alone while the other one came back.
  assert members == {(0,), (1,), (0, 1)}


def test_what_never_comes_about_is_told(tmp_path, monkeypatch):
  """A replica that has no processes never begins."""
  monkeypatch.setattr(groups.Groups, "start", lambda *told: [])
  with group_run.Strikes(tmp_path, 2, deadline=0.1) as strikes:
    monkeypatch.setattr(
      strikes,
      "_wait_for_both",
      lambda run, after, what: run.wait(lambda: False, what, 0.1),
    )
    result = strikes.strike(group_cases.case(2, 2))
  assert result.outcome == "not struck"
  assert "the replicas do not begin in 0.1 s" in result.problems[0]
  assert strikes.left() == []
