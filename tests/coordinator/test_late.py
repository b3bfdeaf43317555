"""One that is behind, or was passed over, does not hold up anybody, itself included."""

import threading
import time

import embedded_runs as runs
import pytest

from optax_dist.coordinator import data_plane, embedded, follower


@pytest.mark.parametrize("behind", [2, 3, 5, 8, 12])
def test_who_is_a_few_steps_behind_catches_up_at_once(behind):
  released, caught_up = threading.Event(), threading.Event()
  took = []

  def train(replica, result):
    if replica.replica == 2:
      # Its thread stands still after the second commit.
      replica.step(runs.compute(replica, 0)[0])
      assert released.wait(10.0)
      began = time.monotonic()
      while replica.global_step < 2 + behind:
        replica.abandon()
        time.sleep(0.005)
      took.append(time.monotonic() - began)
      caught_up.set()
      return
    runs.to_step(2 + behind)(replica, result)
    released.set()
    assert caught_up.wait(10.0)

  plan = {("applied", 2, 2): lambda: released.wait(10.0)}
  with runs.Faults(plan):
    results = runs.run(train, 3, k=2, inline_bytes=0)
  assert [r.error for r in results] == [None] * 3
  assert took[0] < 1.0


def test_a_chief_that_hangs_does_not_slow_its_replica_down():
  released, lines = threading.Event(), {}

  def train(replica, result):
    runs.to_step(8)(replica, result)
    # It would wait for the chief that hangs before each entry of the log.
    follower = replica._follower
    term = follower.line._term
    lines[replica.replica] = term is None or term >= follower.view.term

  world = embedded.World()
  settings = {"k": 2, "n": 2, "inline_bytes": 0, "chief_timeout": 0.5}
  one, two = (runs.make(world, i, **settings) for i in range(2))
  results = [runs.Result(), runs.Result()]
  hangs = {("committing", 0, 3): lambda: released.wait(20.0)}
  with runs.Faults(hangs) as faults:
    threads = [runs.start(one, train, results[0])]
    end = time.monotonic() + 10.0
    while not one.is_chief and time.monotonic() < end:
      time.sleep(0.01)
    threads.append(runs.start(two, train, results[1]))
    for thread in threads:
      thread.join(15.0)
    released.set()
    runs.finish(threads)
  assert faults.done == [("committing", 0, 3)]
  assert [r.error for r in results] == [None] * 2
  assert lines == {0: True, 1: True}


@pytest.mark.parametrize("n", [2, 3], ids=["ahead", "told"])
def test_a_member_that_loses_the_mean_still_took_part(n, monkeypatch, tmp_path):
  # It was stopped between its report and applying the mean, for long.
  apply, failed = follower.Follower._apply, []

  def overwritten(self, mean, entry):
    members = [m[1] for m in entry["members"]]
    if entry["step"] >= 2 and self.replica in members and not failed:
      failed.append((self.replica, entry["step"]))
      raise data_plane.AttemptFailed(None, "overwritten")
    return apply(self, mean, entry)

  monkeypatch.setattr(follower.Follower, "_apply", overwritten)
  path = tmp_path / "run.jsonl"
  results = runs.run(runs.to_step(8), n, k=2, inline_bytes=0, journal=path)
  [(replica, step)] = failed
  found = runs.records(path)
  runs.check_journal(found, 2)
  runs.check_ledger(dict(enumerate(results)), found)
  prints = runs.replay(found)
  for result in results:
    assert result.error is None
    for at, digest in result.prints.items():
      assert digest == prints[at], at
  commit = next(r for r in found if r["kind"] == "commit" and r["step"] == step)
  assert replica in [m["replica"] for m in commit["members"]]
