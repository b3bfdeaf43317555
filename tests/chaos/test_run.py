"""What a run of the fault matrix reports, with processes a test plays.

That faults strike is shown by real ones: tests/coordinator/runs/test_faults.py.
"""

import dataclasses
import json
import types

import pytest

from tests.chaos import cases
from tests.chaos import run as runs


class Pool:
  """Stands for a `Pool`."""

  address, secret = "127.0.0.1:1", "secret"

  def __init__(self, folder):
    self.folder = folder
    self.kept, self.discarded, self.left = [], [], []

  def take(self):
    return types.SimpleNamespace(send=lambda message: None)

  def give_back(self, process):
    self.kept.append(process)

  def discard(self, process):
    self.discarded.append(process)

  def orphans(self):
    return self.left


@pytest.fixture
def run(tmp_path):
  """A run of three replicas at step 3; the first one leads."""
  case = dataclasses.replace(
    cases.case(0), phase="computing", fault="stop", who="replica", data=""
  )
  made = runs._Run(Pool(tmp_path), case)
  for replica in range(3):
    made._add(replica, 0)
    step = {"event": "step", "step": 3, "leader": replica == 0}
    made._members[-1].events.append(step)
  return made


@pytest.mark.parametrize(
  ("problems", "outcome"),
  [
    ([], "ok"),
    (["hang: not over after 90 s; replica 1 at step 3"], "hang"),
    (["replica 0: Boom", "hang: not over after 90 s"], "hang"),
    (["diverged: after steps [3]"], "diverged"),
    (["not struck: the phase was not reached"], "not struck"),
    (["ended early: replica 1 at step 3"], "ended early"),
    (["replica 2 has waited 41.0 s"], "wrong"),
    # Words of a replica's error that only look like it.
    (["replica 0: the exchange of step 3 failed"], "wrong"),
    (["replica 0: the parameters were changed, not struck"], "wrong"),
  ],
)
def test_a_result_is_one_word(problems, outcome):
  assert runs.Result(cases.case(0), problems=problems).outcome == outcome


def _report():
  return {
    **{"event": "result", "error": None, "step": 1, "waited": 0.0},
    **{"calls": [0], "accepted": [0], "reasons": {}, "prints": {}},
    "stats": {"gradients": {"applied": 1}, "pending": 0},
  }


def _commit(step, *replicas):
  return {
    "kind": "commit",
    "step": step,
    "members": [
      {
        **{"replica": replica, "local_step": step, "staleness": 0},
        "batches": f"[[{replica}, 0, {step}]]",
      }
      for replica in replicas
    ],
  }


def test_a_good_run_is_checked_and_its_processes_are_kept(run):
  run._result.struck = True
  for member in run._members:
    member.events.append(_report())
  # A leader that was stopped writes a line that its successor has written.
  run._journal.write_text(2 * (json.dumps(_commit(0, 0, 1, 2)) + "\n"))
  run._conclude()
  assert (run._result.steps, run._result.problems) == (1, [])
  assert len(run._pool.kept) == 3


def test_leftover_processes_are_reported(run):
  for member in run._members[:2]:
    member.events.append(_report())
  run._journal.write_text(json.dumps(_commit(0, 0, 1)) + "\nnonsense\n")
  run._pool.left = [77]
  run._conclude()
  assert run._result.problems == [
    "not struck: the phase was not reached",
    "the journal has a bad line",
    "orphans: [77]",
  ]
  # The third never reported, so it does not go into another run.
  assert run._pool.discarded == [run._members[2].process]


def test_an_error_of_a_replica_is_a_problem_and_an_end_is_none(run):
  run._finishing = True
  for error in (None, "finished", "Boom: it broke"):
    run._take(run._members[0], _report() | {"error": error})
  assert run._result.problems == ["replica 0: Boom: it broke"]


def test_a_replica_that_ends_before_it_is_told_to_ended_early(run):
  run._take(run._members[0], _report())
  assert run._result.problems == ["ended early: replica 0 at step 3"]
