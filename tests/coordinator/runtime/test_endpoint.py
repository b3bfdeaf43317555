"""Runs of several names in one place do not meet."""

import threading

import embedded_runs as runs
import pytest

from optax_dist.coordinator.runtime import endpoint


def test_runs_of_different_names_do_not_meet():
  world, both = endpoint.World(), threading.Barrier(2)

  def train(replica, result):
    both.wait(60.0)
    return replica.step(runs.compute(replica, 0)[0]).members

  results = [runs.Result(), runs.Result()]
  threads = [
    runs.start(runs.make(world, i, k=1, n=1, run=name), train, results[i])
    for i, name in enumerate(["one", "two"])
  ]
  runs.finish(threads)
  assert [r.error for r in results] == [None] * 2
  assert [r.value for r in results] == [(0,), (1,)]


@pytest.mark.parametrize("replica", [0, "a b/c", "x" * 100])
def test_names_of_processes_are_short_and_plain(replica):
  name = endpoint.process_name(replica)
  assert len(name) <= 64
  assert not set(name) & set(" /")
