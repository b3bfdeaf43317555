"""The command of the fault matrix."""

import argparse

import pytest

from tests.chaos import __main__ as command
from tests.chaos import cases as chaos_cases


@pytest.mark.nightly  # tests/coordinator/runs/test_faults.py runs the cases.
def test_the_command_runs_a_case_and_prints_the_table(tmp_path, capsys):
  case = chaos_cases.case(1)
  assert (case.fault, case.who) == ("kill", "leader")
  code = command.main(["--seeds", "1:2", "--output", str(tmp_path)])
  out = capsys.readouterr().out
  assert code == 0, out
  assert f"seed 1, {case}: " in out
  assert f"{case.phase:<20} kill         1/1" in out
  assert "1 ok, 0 hang, 0 diverged, 0 ended early, 0 not struck, 0 wrong" in out
  assert (tmp_path / "run-1.jsonl").exists()


@pytest.mark.parametrize("seeds", ["5", "9:3", "a:b", "-1:4"])
def test_wrong_seeds_are_refused(seeds):
  with pytest.raises(argparse.ArgumentTypeError, match="must be FIRST:END"):
    command.seeds(seeds)
