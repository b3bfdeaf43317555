"""Tests that a run's last line counts every gradient, across leaders."""

import threading

import embedded_runs as runs
import jax
import jax.numpy as jnp
import pytest
from waiting import until


@pytest.mark.parametrize("inline", [True, False])
def test_the_ledger_counts_the_whole_run(tmp_path, inline):
  """Two of three are needed; the leader is killed after a gradient's drop."""
  path = tmp_path / "journal.jsonl"
  world = runs.endpoint.World()
  dropped_at, killed_at = [], []
  # Or two could make all steps before the third is in.
  together = threading.Barrier(3)
  broken = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), runs.PARAMS)

  def train(replica, result):
    together.wait(60.0)
    # All continue until the leader is killed, and the others for a while.
    last = lambda: killed_at[0] + 90 if killed_at else 50_000
    while not replica.finished and replica.global_step < last():
      grads, batch = runs.compute(replica, result.computed)
      if replica.replica == 1 and not dropped_at:
        grads = broken  # One is dropped under the first leader.
      result.computed += 1
      outcome = replica.step(grads, batch=batch)
      if outcome.reason == "non_finite":
        dropped_at.append(outcome.global_step)
      # A drop is in the log with the commit after it.
      late = dropped_at and outcome.global_step > dropped_at[0] + 1
      if replica.replica == 0 and late:
        killed_at.append(outcome.global_step)
        raise runs.Killed
    replica.finish()

  options = {
    "n": 3,
    "k": 2,
    "journal": path,
    "inline_bytes": 64 << 10 if inline else 0,
  }
  results = [runs.Result() for _ in range(3)]
  first = runs.make(world, 0, **options)
  threads = [runs.start(first, train, results[0])]
  until(lambda: first.is_leader)
  threads += [
    runs.start(runs.make(world, i, **options), train, results[i])
    for i in (1, 2)
  ]
  runs.finish(threads)
  assert isinstance(results[0].error, runs.Killed)
  assert [r.error for r in results[1:]] == [None, None]
  found = runs.records(path)
  leaders = [r["replica"] for r in found if r["kind"] == "leader"]
  assert leaders[0] == 0
  assert len(leaders) > 1
  counted = sum(
    m["count"] for r in found if r["kind"] == "commit" for m in r["members"]
  )
  dropped = {}
  for record in found:
    if record["kind"] == "drop":
      reason = record["reason"]
      dropped[reason] = dropped.get(reason, 0) + record["count"]
  [end] = [r for r in found if r["kind"] == "finish"]
  assert end["ledger"]["applied"] == counted
  assert end["load"] is None or end["load"] >= 0
  told = end["ledger"]["dropped"]
  assert told["non_finite"] == dropped["non_finite"] > 0
  assert told.get("stale", 0) <= dropped.get("stale", 0)
