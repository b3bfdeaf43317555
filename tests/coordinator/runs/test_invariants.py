"""Invariants that need parameters: threads train while replicas die and stall.

What the rules alone decide is in tests/quorum/test_rules_properties.py, what the
protocol decides in tests/simulation.
"""

import re
import threading
import time

import embedded_runs as runs
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from optax_dist import coordinator
from optax_dist.coordinator.runtime import endpoint

REPLICAS, STEPS = 3, 6
_IN_ATTEMPT = ("reduce_scatter", "gather")
_OF_REPLICAS = ("computing", "arrived", *_IN_ATTEMPT, "done", "applied")

_times = st.tuples(
  st.sampled_from([*_OF_REPLICAS, "committing"]),
  st.integers(0, REPLICAS - 1),
  st.integers(1, STEPS - 1),
)


def _stall():
  time.sleep(1.2)


def _train_embedded(path, plan, k, late=0, spoilt=(), **settings):
  """Trains in threads; spoilt gradients are not finite in one leaf alone."""

  def train(replica, result):
    while replica.global_step < STEPS:
      grads, batch = runs.compute(replica, result.computed)
      leaf = dict(spoilt).get((replica.replica, result.computed))
      if leaf is not None:
        grads = grads | {leaf: grads[leaf].at[0].set(jnp.nan)}
      result.computed += 1
      result.outcomes.append(replica.step(grads, batch=batch))
      result.prints[replica.global_step] = replica.fingerprint()
      if result.outcomes[-1].finished:
        return  # With all given up at once, it may end early.
    replica.finish()

  path.unlink(missing_ok=True)
  with runs.Faults(plan):
    results = runs.run(
      train,
      REPLICAS,
      k=k,
      journal=path,
      inline_bytes=0,
      **settings,
      quorum={"max_staleness": late, "lower_on_loss": True},
    )
  for result in results:
    expected = runs.Killed | coordinator.RunFinished | None
    assert isinstance(result.error, expected), results
  return results, runs.records(path)


def _check_values(results, found):
  """What each held after each step is what whole gradients make of it."""
  prints = runs.replay(found)
  for result in results:
    for step, digest in result.prints.items():
      assert prints[step] == digest, step


@given(
  st.dictionaries(
    st.tuples(st.integers(0, REPLICAS - 1), st.integers(0, STEPS - 1)),
    st.sampled_from(["b", "w"]),
    min_size=1,
    max_size=4,
  ),
  st.integers(1, REPLICAS),
)
@settings(max_examples=8)
def test_a1_one_bad_leaf_drops_the_whole_gradient(tmp_path_factory, spoilt, k):
  """A1, by values: none of a dropped gradient's leaves is in any mean."""
  path = tmp_path_factory.getbasetemp() / "a1.jsonl"
  results, found = _train_embedded(path, {}, k, spoilt=tuple(spoilt.items()))
  _check_values(results, found)
  bad = {runs.batch_of(*who) for who in spoilt}
  for commit in (r for r in found if r["kind"] == "commit"):
    assert not bad & {b for m in commit["members"] for b in m["batches"]}
  for (replica, number), _ in spoilt.items():
    if number < len(results[replica].outcomes):
      outcome = results[replica].outcomes[number]
      assert outcome.reason in ("non_finite", "stale", "finished")


@given(
  st.tuples(
    st.sampled_from(_IN_ATTEMPT),
    st.integers(0, REPLICAS - 1),
    st.integers(1, STEPS - 1),
  )
)
@settings(max_examples=6)
def test_a3_a_failed_attempt_leaves_no_trace(tmp_path_factory, where):
  """A3 A failed attempt leaves no trace in parameters or optimizer state."""
  path = tmp_path_factory.getbasetemp() / "a3.jsonl"
  results, found = _train_embedded(path, {where: runs.kill}, REPLICAS)
  _check_values(results, found)
  runs.check_journal(found, 1)
  runs.check_ledger(
    {i: r for i, r in enumerate(results) if r.error is None}, found
  )
  # In the midst of an attempt, which the others made without it.
  assert [type(r.error) for r in results].count(runs.Killed) == 1
  commits = [r for r in found if r["kind"] == "commit"]
  assert len(commits) >= STEPS
  assert len(commits[-1]["members"]) == REPLICAS - 1


@given(
  _times,
  st.lists(_times, max_size=2),
  st.integers(1, REPLICAS),
  st.sampled_from([0, 2]),
)
@settings(max_examples=10)
def test_a4_all_live_replicas_are_bit_identical(
  tmp_path_factory, death, stalls, k, late
):
  """A4 After each commit, parameters and optimizer state are bit-identical.

  On all live replicas, though one dies and others stall.
  """
  path = tmp_path_factory.getbasetemp() / "a4.jsonl"
  plan = dict.fromkeys(stalls, _stall) | {death: runs.kill}
  # Less than a stall, so that the others give up a slow replica.
  quick = {"attempt_timeout": 0.4, "leader_timeout": 0.5}
  results, found = _train_embedded(path, plan, k, late, **quick)
  by_step = {}
  for result in results:
    for step, digest in result.prints.items():
      by_step.setdefault(step, set()).add(digest)
  assert all(len(digests) == 1 for digests in by_step.values())
  # And all alike are right.
  _check_values(results, found)


@pytest.fixture(scope="module")
def hangs():
  """By phase: whether one of two has hung there, and what the other was told.

  All at once: their deadlines are beyond what a busy machine delays.
  """
  patience = {"timeout": 2.8, "attempt_timeout": 2.5, "leader_timeout": 1.1}
  released, results, threads = threading.Event(), [], []
  hang = lambda: released.wait(120.0)
  plan = {(phase, 2 * i, 2): hang for i, phase in enumerate(_OF_REPLICAS)}
  with runs.Faults(plan) as faults:
    for replica in range(2 * len(plan)):
      if replica % 2 == 0:
        world, together = endpoint.World(), threading.Barrier(2)

      def train(replica, result, together=together):
        together.wait(60.0)
        runs.to_step(STEPS)(replica, result)

      one = runs.make(world, replica, k=2, n=2, inline_bytes=0, **patience)
      results.append(runs.Result())
      threads.append(runs.start(one, train, results[-1]))
    for thread in threads[1::2]:
      thread.join(60.0)
    # By its own deadline: what it waits for still hangs.
    ended = [not thread.is_alive() for thread in threads[1::2]]
    released.set()
    runs.finish(threads)
  return {
    phase: (key in faults.done and ended[i], results[2 * i + 1].error)
    for i, (key, phase) in enumerate(zip(plan, _OF_REPLICAS, strict=True))
  }


@pytest.mark.parametrize("phase", _OF_REPLICAS)
def test_a6_every_wait_has_a_deadline(hangs, phase):
  """A6 Every wait has a deadline.

  When one passes, the error names what was waited for, for how long, and which
  replicas are missing.
  """
  in_time, error = hangs[phase]
  assert in_time, error
  assert isinstance(error, coordinator.CoordinatorError)
  told = str(error)
  assert re.search(r"[Ss]tep \d|this step's commit", told), told
  assert re.search(r"\d+\.\d s", told), told
  assert f"replica {2 * _OF_REPLICAS.index(phase)}" in told, told
