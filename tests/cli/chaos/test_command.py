"""The command of the fault matrix, and what it checks."""

import copy
import json

import pytest

from optax_dist.cli import main
from optax_dist.cli.chaos import cases as chaos_cases
from optax_dist.cli.chaos import checks as chaos_checks


def _commit(step, *replicas):
  members = [
    {
      "replica": replica,
      "local_step": step,
      "staleness": 0,
      "batches": [[replica, 0, step]],
    }
    for replica in replicas
  ]
  return {"kind": "commit", "step": step, "members": members}


def _good():
  records = [_commit(step, 0, 1) for step in range(3)]
  records += [
    {"kind": "fingerprint", "step": s, "state": f"print {s}"} for s in (1, 2, 3)
  ]
  seen = {
    "calls": [0, 1, 2, 3],
    "accepted": [0, 1, 2],
    "reasons": {"3": "finished"},
    "prints": {"1": "print 1", "3": "print 3"},
    "waited": 0.5,
    "step": 3,
    "stats": {"gradients": {"applied": 3, "finished": 1}, "pending": 0},
  }
  return records, [(0, 0, seen), (1, 0, copy.deepcopy(seen))]


def _spoilt(how):
  records, reports = _good()
  seen = reports[1][2]
  match how:
    case "twice":
      records.insert(2, copy.deepcopy(records[1]))
    case "lost commit":
      del records[1]
    case "diverged":
      seen["prints"]["3"] = "another"
    case "applied elsewhere":
      seen["accepted"].remove(1)
      seen["reasons"]["1"] = "stale"
    case "applied here alone":
      records[2]["members"][1]["batches"] = None
    case "no outcome":
      seen["calls"].append(4)
    case "no reason":
      seen["reasons"] = {"3": ""}
    case "waited":
      seen["waited"] = 11.0
    case "behind":
      seen["step"] = 2
    case "gradient twice":
      records[2]["members"][0]["batches"] = [[0, 0, 1]]
    case "staleness":
      records[2]["members"][0]["local_step"] = 1
    case "memory":
      seen["stats"]["pending"] = 1000
    case "nobody":
      reports = []
  return records, reports


def test_a_good_run_has_no_problems():
  assert chaos_checks.check(*_good(), timeout=10.0) == (3, [])


def test_a_gradient_told_lost_may_have_been_applied():
  """A7: `lost` means that it isn't known to count."""
  records, reports = _good()
  seen = reports[1][2]
  seen["accepted"].remove(1)
  seen["reasons"]["1"] = "lost"
  assert chaos_checks.check(records, reports, timeout=10.0) == (3, [])


@pytest.mark.parametrize(
  ("how", "words"),
  [
    ("twice", "twice [1]"),
    ("lost commit", "missing [1]"),
    ("diverged", "diverged: after steps [3]"),
    ("applied elsewhere", "the journal what it was told is {1: 'stale'}"),
    ("applied here alone", "takes [2] for applied"),
    ("no outcome", "a gradient has no outcome"),
    ("no reason", "dropped without reason"),
    ("waited", "has waited 11.0 s"),
    ("behind", "ended at steps [2, 3]"),
    ("gradient twice", "applied twice: [(0, 0, 1)]"),
    ("staleness", "the staleness in the journal is wrong"),
    ("memory", "still holds 1000"),
    ("nobody", "nobody was there"),
  ],
)
def test_whatever_is_wrong_is_noticed(how, words):
  _, problems = chaos_checks.check(*_spoilt(how), timeout=10.0)
  assert words in " ".join(problems)


def test_seeds_in_a_row_are_the_whole_matrix():
  cells = [str(chaos_cases.case(seed)) for seed in range(110)]
  assert len(set(cells)) == 110
  first = {(c.phase, c.fault) for c in map(chaos_cases.case, range(55))}
  assert len(first) == 55


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
