"""The invariants of a run: a good one has no problems, a spoilt one is noticed."""

import copy

import outcomes
import pytest

from optax_dist.coordinator.outcome import Outcome
from tests.runs import checks as run_checks


def _commit(step, *replicas):
  members = [
    {
      "replica": replica,
      "local_step": step,
      "staleness": 0,
      "batches": f"[[{replica}, 0, {step}]]",
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
      records[2]["members"][0]["batches"] = "[[0, 0, 1]]"
    case "staleness":
      records[2]["members"][0]["local_step"] = 1
    case "memory":
      seen["stats"]["pending"] = 1000
    case "order":
      records[0], records[1] = records[1], records[0]
    case "journal diverged":
      records[3]["state"] = "another"
    case "future":
      records[1]["members"][0]["local_step"] = 2
      records[1]["members"][0]["staleness"] = -1
    case "count":
      seen["stats"]["gradients"]["applied"] = 2
    case "drop":
      records.append({"kind": "drop", "reason": ""})
    case "nobody":
      reports = []
  return records, reports


def test_valid_run_has_no_problems():
  assert run_checks.check(*_good(), timeout=10.0) == (3, [])


def test_gradient_reported_as_lost_may_have_been_applied():
  """A7: `lost` means that it isn't known to count."""
  records, reports = _good()
  seen = reports[1][2]
  seen["accepted"].remove(1)
  seen["reasons"]["1"] = "lost"
  assert run_checks.check(records, reports, timeout=10.0) == (3, [])


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
    ("order", "not each once and in order"),
    ("journal diverged", "diverged: after steps [1]"),
    ("future", "the staleness in the journal is wrong"),
    ("count", "counts 3 gradients of 4"),
    ("drop", "the journal has a drop without a reason"),
    ("nobody", "nobody was there"),
  ],
)
def test_each_violation_is_noticed(how, words):
  _, problems = run_checks.check(*_spoilt(how), timeout=10.0)
  assert words in " ".join(problems)


def test_run_ended_by_a_new_incarnation_is_valid():
  """No process can report gradients of a dead predecessor."""
  records, reports = _good()
  records[2]["members"][1]["batches"] = "[[1, 7, 0]]"
  replica, _, seen = reports[1]
  seen["accepted"] = seen["calls"] = [0]
  seen["reasons"], seen["stats"]["gradients"] = {}, {"applied": 1}
  reports[1] = (replica, 7, seen)
  assert run_checks.check(records, reports, timeout=10.0) == (3, [])


def test_member_may_contribute_several_gradients_or_none():
  records, reports = _good()
  # Replica 0 gave two in the last step, and replica 1 none of its own.
  records[2]["members"][0]["batches"] = "[[0, 0, 2], [0, 0, 3]]"
  records[2]["members"][1]["batches"] = None
  first, second = (seen for _, _, seen in reports)
  first["accepted"], first["reasons"] = [0, 1, 2, 3], {}
  second["accepted"], second["reasons"] = (
    [0, 1],
    {"2": "stale", "3": "finished"},
  )
  assert run_checks.check(records, reports, timeout=10.0) == (3, [])


def test_gradient_of_an_unfinished_sum_may_be_missing():
  records, reports = _good()
  for _, _, seen in reports:
    seen["calls"].append(4)
    seen["stats"]["gradients"]["applied"] += 1
    seen["undecided"] = [4]
  reports[1][2]["accepted"].remove(2)
  reports[1][2]["undecided"] = [2, 4]
  assert run_checks.check(records, reports, timeout=10.0) == (3, [])


def test_samples_are_checked_if_the_run_has_any(monkeypatch):
  notified = []
  monkeypatch.setattr(
    run_checks.samples,
    "check",
    lambda *of: notified.append(of) or ["a sample is lost"],
  )
  records, reports = _good()
  _, problems = run_checks.check(records, reports, 10.0, data="the data")
  assert problems == ["a sample is lost"]
  assert notified == [("the data", records[:3], reports)]


def test_dropped_sum_is_not_part_of_the_next_sum():
  seen = outcomes.none_yet()
  outcomes.note(seen, 0, Outcome(True, "", 0))
  outcomes.note(seen, 1, Outcome(False, "lost", 0))
  outcomes.note(seen, 2, Outcome(True, "", 0))
  outcomes.note(seen, 3, Outcome(True, "", 1, members=(0, 1)))
  assert seen["accepted"] == [2, 3]
  assert (seen["reasons"], seen["undecided"]) == ({"1": "lost"}, [0])


def test_steps_may_repeat_if_a_run_begins_again():
  run = lambda step: {"kind": "run", "step": step}
  commit = lambda step: {"kind": "commit", "step": step}
  good = [run(0), commit(0), commit(1), run(1), commit(1)]
  assert run_checks.in_order(good) == []
  bad = [run(0), commit(0), commit(2), run(1), commit(2)]
  assert run_checks.in_order(bad) == [
    "commit 2 comes where 1 is due",
    "commit 2 comes where 1 is due",
  ]
