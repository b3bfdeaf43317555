"""Replay finds the run again, and the first step at which it does not."""

import copy
import hashlib

import numpy as np
import pytest

from optax_dist import simulate

N = 5


def gradient_of(params, batch):
  return np.sin(params * np.float32(batch % 7 + 1)) + np.float32(batch)


class Live:
  """Replicas that really hold parameters, driven by the simulated events."""

  def __init__(self, strategy, **options):
    self.records = []
    self.params = np.ones(3, np.float32)
    self.held = {}
    self.batches = iter(range(10**6))
    simulate.simulate_timing(
      strategy,
      simulate.parse_latency("lognormal:0,1"),
      N,
      steps=60,
      journal=self,
      **options,
    )

  def write(self, kind, /, **fields):
    record = {"kind": kind} | copy.deepcopy(fields)
    self.records.append(record)
    if kind in ("join", "drop"):
      self.held[fields["replica"]] = self.params
    if kind == "commit":
      total = np.zeros(3, np.float32)
      for member in record["members"]:
        member["batches"] = [next(self.batches) for _ in range(member["count"])]
        for batch in member["batches"]:
          total += gradient_of(self.held[member["replica"]], batch)
      count = sum(m["count"] for m in record["members"])
      self.params = self.params - np.float32(1e-3) * (total / np.float32(count))
      for member in record["members"]:
        self.held[member["replica"]] = self.params
        self.records.append(
          {
            "kind": "fingerprint",
            "step": record["step"] + 1,
            "replica": member["replica"],
            "params": digest(self.params),
            "state": None,
          }
        )


def digest(params):
  return hashlib.blake2b(params.tobytes(), digest_size=8).hexdigest()


def _replay(records, **options):
  def aggregate(gradients, members):
    total = np.zeros(3, np.float32)
    for gradient in gradients:
      for part in gradient:
        total += part
    return total / np.float32(sum(m["count"] for m in members))

  return simulate.replay(
    records,
    **{
      "init": lambda: np.ones(3, np.float32),
      "gradient": lambda state, member: [
        gradient_of(state, batch) for batch in member["batches"]
      ],
      "aggregate": aggregate,
      "apply": lambda state, mean: state - np.float32(1e-3) * mean,
      "fingerprint": lambda state: {"params": digest(state)},
    }
    | options,
  )


@pytest.mark.parametrize(
  ("strategy", "options"),
  [
    (simulate.sync_replicas(3), {"failures": simulate.Failures(0.1, 2.0)}),
    (simulate.sync_replicas(2, max_staleness=3), {}),
    (simulate.sync_replicas(12), {}),
  ],
)
def test_a_run_with_losses_is_found_again(strategy, options):
  live = Live(strategy, **options)
  told = []
  outcome = _replay(live.records, progress=lambda *at: told.append(at))
  assert str(outcome) == "identical, 60 steps"
  np.testing.assert_array_equal(outcome.state, live.params)
  assert told == [(i, 60) for i in range(1, 61)]


def test_the_first_step_that_differs_is_told():
  records = Live(simulate.sync_replicas(3)).records
  commits = [r for r in records if r["kind"] == "commit"]
  commits[17]["members"][1]["batches"][0] += 1
  outcome = _replay(records)
  assert (outcome.difference.step, outcome.steps) == (18, 18)
  assert str(outcome).startswith("step 18: params of replica ")
  assert outcome.difference.recorded != outcome.difference.replayed
  # The fingerprint of one replica alone, too.
  records = Live(simulate.sync_replicas(3)).records
  of_step = [r for r in records if r.get("step") == 5 and "params" in r]
  of_step[-1]["params"] = "0" * 16
  outcome = _replay(records)
  assert outcome.difference.step == 5
  assert outcome.difference.replica == of_step[-1]["replica"]


def test_no_fingerprints_is_not_identical():
  live = Live(simulate.sync_replicas(3))
  none = [r for r in live.records if r["kind"] != "fingerprint"]
  assert "no fingerprints" in str(_replay(none))
  some = [
    r for r in live.records if r["kind"] != "fingerprint" or r["step"] < 9
  ]
  assert str(_replay(some)) == (
    "identical, 60 steps, of which 8 have fingerprints"
  )


def test_what_a_resumed_job_had_lost_is_left_out():
  records = Live(simulate.sync_replicas(3)).records
  at = next(i for i, r in enumerate(records) if r.get("step") == 20)
  # Ten steps that were lost with the job, which resumes from a checkpoint.
  lost = copy.deepcopy(
    [r for r in records if r["kind"] != "run" and 20 < r["step"] <= 29]
  )
  commit = next(r for r in records[at:] if r["kind"] == "commit")
  for record in [commit | {"step": 20}, *lost]:
    record["params"] = "f" * 16
  resumed = [
    *records[:at],
    commit | {"step": 20},
    *(r for r in lost if r["kind"] == "commit"),
    records[0] | {"step": 20},
    *records[at:],
  ]
  assert str(_replay(resumed)) == "identical, 60 steps"


def _without(records, step):
  return [r for r in records if r["kind"] != "commit" or r["step"] != step]


@pytest.mark.parametrize(
  ("change", "said"),
  [
    (lambda r: [], "is empty"),
    (lambda r: r[1:], "does not begin with a run"),
    (lambda r: _without(r, 7), "lacks the commit of step 7: .* of step 8"),
    (
      lambda r: [r[0] | {"strategy": "elastic_average"}, *r[1:]],
      "of elastic_average, which has no commits",
    ),
    (lambda r: [*r, r[0] | {"step": 90}], "goes on at step 90"),
  ],
)
def test_what_cannot_be_replayed_is_refused(change, said):
  records = Live(simulate.sync_replicas(3)).records
  with pytest.raises(ValueError, match=said):
    _replay(change(records))


def test_members_must_say_what_they_computed_on():
  records = Live(simulate.sync_replicas(3)).records
  member = next(r for r in records if r["kind"] == "commit")["members"][0]
  batches, member["batches"] = member["batches"], None
  with pytest.raises(ValueError, match=r"step 0: .* on which batches replica"):
    _replay(records)
  member["batches"], member["local_step"] = batches, -1
  with pytest.raises(ValueError, match="which is before the journal"):
    _replay(records)
  member["local_step"] = 3
  with pytest.raises(ValueError, match="a future step"):
    _replay(records)
