"""The command of the fault matrix."""

import json

import pytest

from optax_dist.cli import main
from optax_dist.cli.chaos import cases as chaos_cases


def test_the_command_runs_a_case_and_prints_the_table(tmp_path, capsys):
  # The leader is killed while it aggregates: seed 58.
  case = chaos_cases.case(58)
  assert str(case) == "reduce_scatter/kill/replica" or case.fault == "kill"
  report = tmp_path / "report.json"
  code = main.main(["chaos", "--seeds", "58:59", "--json", str(report)])
  out = capsys.readouterr().out
  assert code == 0, out
  [row] = json.loads(report.read_text())
  assert (row["outcome"], row["problems"]) == ("ok", [])
  assert row["steps"] >= 6
  assert "1 runs in" in out
  assert "1 ok, 0 hangs, 0 divergences" in out
  line = next(x for x in out.splitlines() if x.split()[:1] == [case.phase])
  assert line.split() == [case.phase, "1/1"]


@pytest.mark.parametrize("seeds", ["5", "9:3", "a:b", "-1:4"])
def test_wrong_seeds_are_refused(capsys, seeds):
  assert main.main(["chaos", f"--seeds={seeds}"]) == 2
  assert "must be FIRST:END" in capsys.readouterr().err


def test_an_output_that_can_not_be_is_told(tmp_path, capsys):
  taken = tmp_path / "taken"
  taken.touch()
  assert main.main(["chaos", "--seeds", "0:1", "--output", str(taken)]) == 2
  assert "it is a file, not a directory" in capsys.readouterr().err
