"""One that is behind, or was passed over, does not hold up anybody, itself included."""

import threading
import time

import embedded_runs as runs
import pytest

from optax_dist.coordinator import board_log, data_plane, embedded, follower


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


@pytest.mark.parametrize("entries", [0, 1])
def test_a_newcomer_whose_answer_is_gone_asks_again(entries):
  let_in, others = threading.Event(), [runs.Result(), runs.Result()]

  def train(replica, result):
    while not let_in.is_set():
      replica.step(runs.compute(replica, 0)[0])

  world = embedded.World()
  settings = {"k": 2, "n": 3}
  members = [runs.make(world, i, **settings) for i in range(2)]
  threads = [
    runs.start(*each) for each in zip(members, [train] * 2, others, strict=True)
  ]
  late = runs.make(world, 2, **settings)
  reader, read = late._follower._reader, []
  actual = reader.read

  def slow(position, *rest):
    # It stands still while its answer comes, and goes.
    if len(read) == entries:
      hello = late._follower.incarnation
      end = time.monotonic() + 20.0
      answered = lambda: members[0]._follower.view.hellos > hello
      while not answered() and time.monotonic() < end:
        time.sleep(0.001)
      gone = members[0]._follower.position
      while reader._log.trimmed() <= gone and time.monotonic() < end:
        time.sleep(0.01)
    read.append(position)
    return actual(position, *rest)

  reader.read = slow
  result = runs.Result()

  def take_part(replica, result):
    let_in.set()
    return replica.global_step

  thread = runs.start(late, take_part, result)
  runs.finish([*threads, thread])
  assert [r.error for r in (*others, result)] == [None] * 3
  # More than the log keeps went by meanwhile.
  assert result.value > 2 * board_log.BLOCK
  assert late._follower.incarnation > 2


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
