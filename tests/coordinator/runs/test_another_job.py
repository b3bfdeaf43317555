"""Replicas with different jobs: the run has the job of most, and names the others."""

import threading
import time

import embedded_runs as runs
import optax
from waiting import until

from optax_dist.coordinator.errors import JoinRefused


def test_first_replica_with_a_differing_job_takes_no_step_alone(caplog):
  """A step needs only one replica, but another that has called does not agree."""
  world, results = runs.endpoint.World(), [runs.Result() for _ in range(3)]
  is_there, others_are_there = threading.Event(), threading.Event()

  def wrong(replica, result):
    is_there.set()
    assert others_are_there.wait(60.0)
    runs.to_step(1)(replica, result)

  make = lambda i, **options: runs.make(world, i, k=1, n=3, **options)
  first = make(0, opt=optax.sgd(0.5, momentum=0.5))
  threads = [runs.start(first, wrong, results[0])]
  assert is_there.wait(60.0)
  threads.append(runs.start(make(1), runs.to_step(3), results[1]))
  until(lambda: "replica 1 does not agree" in caplog.text)
  others_are_there.set()
  time.sleep(0.3)  # So long it would have had for its step.
  threads.append(runs.start(make(2), runs.to_step(3), results[2]))
  runs.finish(threads)
  assert isinstance(results[0].error, JoinRefused)
  assert "optimizer" in str(results[0].error)
  assert [result.error for result in results[1:]] == [None] * 2
  both = results[1].prints.keys() & results[2].prints.keys()
  assert all(results[1].prints[s] == results[2].prints[s] for s in both)


def test_run_does_not_wait_for_a_refused_replica():
  """With `lower_on_loss` the others go on without it, though all were needed."""
  world, results = runs.endpoint.World(), [runs.Result() for _ in range(3)]
  lower = {"lower_on_loss": True}
  make = lambda i, **options: runs.make(
    world, i, k=3, n=3, quorum=lower, timeout=20.0, **options
  )
  makes = [make(0), make(1), make(2, opt=optax.sgd(0.5, momentum=0.5))]
  runs.finish(
    [
      runs.start(a_make, runs.to_step(3), result)
      for a_make, result in zip(makes, results, strict=True)
    ]
  )
  assert isinstance(results[2].error, JoinRefused)
  assert [result.error for result in results[:2]] == [None] * 2
  assert [len(r.outcomes) for r in results[:2]] == [3, 3]
