"""That no sample goes missing or twice in a run of the fault matrix unnoticed."""

import copy

import pytest

from optax_dist import ledger
from tests.runs import samples

DATA = samples.batches("exact", 2)


def _run():
  """Two replicas, each epoch of four steps of four samples."""
  commits, drawn = [], ({}, {})
  progress = ledger.Progress()
  for step in range(5):
    members = []
    for replica in range(2):
      start = 4 * step + 2 * replica
      spans = ((start, start + 2),)
      progress = progress.commit(spans)
      drawn[replica][str(step)] = DATA.indices(spans).tolist()
      members.append(
        {
          "data": [list(span) for span in spans],
          "count": 1,
          "batches": f"[[{replica}, 0, {step}]]",
        }
      )
    commits.append({"step": step, "members": members})
  data = samples.plain(ledger.report(DATA, progress))
  seen = {"accepted": list(range(5)), "data": data}
  reports = [(i, 0, seen | {"drawn": drawn[i]}) for i in range(2)]
  return commits, copy.deepcopy(reports)


def test_valid_samples_have_no_problems():
  assert samples.check(DATA, *_run()) == []


@pytest.mark.parametrize(
  ("how", "words"),
  [
    ("twice", "were in a committed step before"),
    ("short", "step 1: a gradient on [18]"),
    ("drawn", "step 1: replica 0 computed on [0]"),
    ("report", "replica 1 reports"),
    ("early", "epoch 0 was left too early"),
  ],
)
def test_each_violation_is_noticed(how, words):
  commits, reports = _run()
  match how:
    case "twice":
      commits[2]["members"][0]["data"] = [[0, 2]]
    case "short":
      end = commits[1]["members"][1]["data"][0][1]
      commits[1]["members"][1]["data"] = [[end - 1, end]]
    case "drawn":
      reports[0][2]["drawn"]["1"] = [0]
    case "report":
      reports[1][2]["data"][0][1] -= 1
    case "early":
      del commits[3]
  assert words in " ".join(samples.check(DATA, commits, reports))
