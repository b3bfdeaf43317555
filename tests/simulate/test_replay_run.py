"""A run of the coordinator is replayed bit for bit."""

import copy
import random
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import run_journals

from optax_dist import coordinator
from optax_dist.coordinator import journal
from optax_dist.simulate import replay_run

N = 5
START = {
  "w": np.linspace(-1, 1, 192, dtype=np.float32),
  "b": np.full(64, 0.5, np.float32),
}
OPTIMIZER = optax.sgd(0.05, momentum=0.9)


@jax.jit
def gradient(params, batch):
  key = jax.random.key(batch, impl="rbg")
  noise = jax.random.normal(key, params["w"].shape)
  return jax.grad(
    lambda p: jnp.mean(jnp.sin(p["w"] * jnp.mean(p["b"])) ** 2 + noise * p["w"])
  )(params)


def _train(number, steps=25):
  # Or some could be done before others are in.
  everyone = threading.Barrier(N, timeout=60)

  def train(replica):
    everyone.wait()
    rng = random.Random(number + hash(replica.replica))
    batch = 1000 * replica.replica
    while replica.global_step < steps and not replica.finished:
      based_on = replica.params
      time.sleep(rng.expovariate(1 / 0.003))
      batch += 1
      replica.step(gradient(based_on, batch), batch=batch)
      if rng.random() < 0.02 and replica.replica:
        return  # It goes before the others do.
    if not replica.finished:
      replica.finish()

  return train


def _replay(records, params=START):
  return replay_run(
    records, optimizer=OPTIMIZER, params=params, gradient=gradient
  )


@pytest.mark.parametrize(
  ("k", "options"),
  [
    (3, {}),
    (2, {"max_staleness": 2, "staleness_weight": "inverse"}),
    (3, {"wire": "bfloat16"}),
    (3, {"wire": "int8"}),
    (8, {}),
  ],
)
def test_run_of_threads_is_replayed_to_the_last_bit(tmp_path, k, options):
  path = tmp_path / "run.jsonl"
  coordinator.run_embedded(
    _train(k),
    N,
    OPTIMIZER,
    START,
    replicas_to_aggregate=k,
    journal=str(path),
    fingerprint_every=1,
    timeout=60.0,
    **options,
  )
  records = run_journals.whole(path)
  outcome = _replay(records)
  assert str(outcome).startswith("identical in")
  assert outcome.steps >= 25
  assert outcome.compared >= 20
  # Another batch is found out.
  commits = [r for r in records if r["kind"] == "commit"]
  member = commits[12]["members"][0]
  first, *rest = journal.batches(member)
  member["batches"] = str([first + 1, *rest])
  assert re.match("step 1[345]: ", _replay(records).difference)


def test_slices_in_int8_are_replayed_as_a_whole(tmp_path):
  path = tmp_path / "run.jsonl"
  start = {
    "w": np.linspace(-1, 1, 9000, dtype=np.float32),
    "b": np.full(64, 0.5, np.float32),
  }
  coordinator.run_embedded(
    _train(3),
    N,
    OPTIMIZER,
    start,
    replicas_to_aggregate=3,
    journal=str(path),
    fingerprint_every=1,
    timeout=60.0,
    wire="int8",
    inline_bytes=0,
  )
  outcome = _replay(run_journals.whole(path), start)
  assert str(outcome).startswith("identical in")
  assert outcome.compared >= 20


# Journals that can't be replayed, or only in part.


@pytest.fixture(scope="module")
def journal_of_a_run(tmp_path_factory):
  path = tmp_path_factory.mktemp("replay") / "run.jsonl"
  coordinator.run_embedded(
    _train(3),
    N,
    OPTIMIZER,
    START,
    replicas_to_aggregate=3,
    journal=str(path),
    fingerprint_every=1,
    timeout=60.0,
  )
  return run_journals.whole(path)


@pytest.fixture
def records(journal_of_a_run):
  return copy.deepcopy(journal_of_a_run)


def _commits(records):
  return [r for r in records if r["kind"] == "commit"]


def test_first_step_that_differs_is_named(records):
  (first, *_) = [
    r for r in records if r["kind"] == "fingerprint" and r["step"] == 5
  ]
  first["params"] = "0" * 16
  outcome = _replay(records)
  assert outcome.steps == 5
  assert str(outcome).startswith(
    f"step 5: params of replica {first['replica']} differ, recorded {'0' * 16},"
  )


def test_steps_without_fingerprints_are_not_called_identical(records):
  none = [r for r in records if r["kind"] != "fingerprint"]
  assert str(_replay(none)).startswith("identical in 0 of ")
  some = [r for r in records if r["kind"] != "fingerprint" or r["step"] < 9]
  assert str(_replay(some)).startswith("identical in 8 of ")


def test_steps_that_a_resumed_job_had_lost_are_left_out(records):
  """Steps 8 to 11 were lost with the job, which resumes from a checkpoint."""
  run, *rest = records
  at = next(i for i, r in enumerate(rest) if r.get("step") == 8)
  lost = copy.deepcopy([c for c in _commits(rest) if 8 <= c["step"] <= 11])
  for commit in lost:
    commit["members"][0]["batches"] = "[12345]"
  resumed = [run, *rest[:at], *lost, run | {"step": 8}, *rest[at:]]
  outcome = _replay(resumed)
  assert not outcome.difference
  assert outcome.steps == len(_commits(records))


@pytest.mark.parametrize(
  ("change", "said"),
  [
    (lambda r: [], "is empty"),
    (lambda r: r[1:], "does not begin with a run"),
    (
      lambda r: [x for x in r if x["kind"] != "commit" or x["step"] != 7],
      "lacks the commit of step 7: .* of step 8",
    ),
    (
      lambda r: [r[0] | {"strategy": "elastic_average"}, *r[1:]],
      "of elastic_average, which has no commits",
    ),
    (
      lambda r: [r[0] | {"data": {"deterministic": True}}, *r[1:]],
      "run the program again",
    ),
    (lambda r: [*r, r[0] | {"step": 90}], "goes on at step 90"),
  ],
)
def test_journal_that_cannot_be_replayed_is_refused(records, change, said):
  with pytest.raises(ValueError, match=said):
    _replay(change(records))


@pytest.mark.parametrize(
  ("field", "value", "said"),
  [
    ("batches", None, r"step 0: .* on which batches replica"),
    ("batches", "[NaN", r"step 0: .* on which batches replica"),
    ("local_step", -1, "which is before the journal"),
    ("local_step", 3, "a future step"),
  ],
)
def test_member_must_say_what_it_computed_on(records, field, value, said):
  _commits(records)[0]["members"][0][field] = value
  with pytest.raises(ValueError, match=said):
    _replay(records)
