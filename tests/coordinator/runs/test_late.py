"""One that is behind, or was passed over, does not hold up anybody, itself included."""

import threading
import time

import embedded_runs as runs
import pytest


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
