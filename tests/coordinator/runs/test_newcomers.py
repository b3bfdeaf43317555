"""A replica that joins again blocks no step before its first gradient."""

import threading
import time

import embedded_runs as runs
import jax
import numpy as np
import pytest
import waiting

from optax_dist import ledger
from optax_dist.coordinator import strategies
from optax_dist.coordinator.training import waiting as waiting_loop


@pytest.mark.parametrize("takes", ["as long as before", "longer"])
def test_newcomer_that_has_compiled_contributes_to_the_next_step(
  monkeypatch, takes
):
  """Its gradient of the step amid which it joins would be for nothing."""
  # However busy the machine is.
  monkeypatch.setattr(waiting_loop, "_LATE", 60.0, raising=False)
  options = {"k": 3, "n": 3, "quorum": {"lower_on_loss": True}}
  world, results = runs.endpoint.World(), [runs.Result() for _ in range(4)]
  over, amid = threading.Event(), threading.Event()

  def survive(replica, result):
    holds = takes == "longer"
    while not over.is_set():
      time.sleep(0.5)
      if holds and amid.is_set():
        holds = False
        waiting.until(lambda: again._participant.inbox.joined.incarnation >= 0)
        time.sleep(0.5)
      result.outcomes.append(replica.step(runs.compute(replica, 0)[0]))

  def die(replica, result):
    runs.to_step(3)(replica, result)
    raise runs.Killed

  def come_back(replica, result):
    outcome = replica.step(runs.compute(replica, 0)[0])
    over.set()
    return outcome

  make = lambda i: runs.make(world, i, **options)
  threads = [runs.start(make(i), survive, results[i]) for i in (0, 1)]
  runs.finish([runs.start(make(2), die, results[2])])
  step = len(results[0].outcomes)
  waiting.until(lambda: len(results[0].outcomes) >= step + 2)
  again = runs.make(world, 2, name="again", **options)
  start, again.start = again.start, lambda: start(warm=True)
  amid.set()
  runs.finish([*threads, runs.start(again, come_back, results[3])])
  assert [r.error for r in results[:2] + results[3:]] == [None] * 3
  # Its first gradient is in a step at once.
  assert results[3].value.members == (0, 1, 2)
  assert results[3].counts == {"applied": 1, "stale": 1}


def _local(opt, quorum):
  return strategies.local_updates(communication_period=2)(opt, quorum)


_KINDS = {
  "inline": {"inline_bytes": 64 << 10},
  "between replicas": {"inline_bytes": 0},
  "local updates": {"strategy": _local},
  "samples that are leased": {
    "data": ledger.Batches(num_samples=600, global_batch=6, seed=3)
  },
}


@pytest.mark.parametrize("kind", _KINDS)
def test_first_gradient_of_a_newcomer_does_not_block_the_others(kind):
  # Longer than this test: no wait ends by a deadline.
  slow = {"timeout": 300.0, "transfer_timeout": 100.0, "silence_timeout": 100.0}
  options = {"k": 3, "n": 3, "quorum": {"lower_on_loss": True}}
  options |= slow | _KINDS[kind]
  world, results = runs.endpoint.World(), [runs.Result() for _ in range(4)]
  dead, back, ahead, whole = (threading.Event() for _ in range(4))
  began_at = []

  def steps(replica, result):
    """One gradient after the other, on samples if they are leased."""
    if not replica.has_data:
      while True:
        yield replica.step(runs.compute(replica, result.computed)[0])
        result.computed += 1
    for _ in replica.batches():
      yield replica.step(runs.compute(replica, result.computed)[0])
      result.computed += 1

  def survive(replica, result):
    for outcome in steps(replica, result):
      if replica.global_step == 3:
        assert dead.wait(60.0)
      if replica.global_step == 5:
        assert back.wait(60.0)
      if began_at and replica.global_step >= began_at[0] + 4:
        ahead.set()
      if ahead.is_set() and len(outcome.members) == 3:
        whole.set()
      result.prints[replica.global_step] = replica.fingerprint()
      if whole.is_set():
        return

  def die(replica, result):
    for _ in steps(replica, result):
      if replica.global_step == 2:
        raise runs.Killed

  def come_back(replica, result):
    took = iter(steps(replica, result))
    began_at.append(replica.global_step)
    back.set()
    if not replica.has_data:  # It gets samples only after the next step.
      assert ahead.wait(60.0)
    for _ in took:
      result.prints[replica.global_step] = replica.fingerprint()
      if whole.is_set():
        return

  make = lambda i: runs.make(world, i, **options)
  threads = [runs.start(make(i), survive, results[i]) for i in (0, 1)]
  doomed = runs.start(make(2), die, results[2])
  runs.finish([doomed])
  dead.set()
  again = runs.make(world, 2, name="again", **options)
  runs.finish([*threads, runs.start(again, come_back, results[3])])
  assert [r.error for r in results[:2] + results[3:]] == [None] * 3
  assert isinstance(results[2].error, runs.Killed)
  both = results[0].prints.keys() & results[3].prints.keys()
  assert both
  assert all(results[0].prints[s] == results[3].prints[s] for s in both)


def test_newcomer_gets_samples_that_were_nonfinite_on_another_replica():
  """Otherwise the other replica would use all samples up without a step."""
  data = ledger.Batches(num_samples=12, global_batch=2, seed=3)
  options = {"k": 2, "n": 2, "quorum": {"lower_on_loss": True}, "data": data}
  world, results = runs.endpoint.World(), [runs.Result() for _ in range(3)]
  back, has_samples = threading.Event(), threading.Event()

  def bad_at_first(replica, result):
    for _ in replica.batches():
      assert back.wait(60.0)
      grads, _ = runs.compute(replica, 0)
      if not has_samples.is_set():
        grads = jax.tree.map(lambda g: g * np.nan, grads)
      result.outcomes.append(replica.step(grads))
    return replica.report_data()

  def die(replica, result):
    raise runs.Killed

  def come_back(replica, result):
    back.set()
    for _ in replica.batches():
      has_samples.set()
      result.outcomes.append(replica.step(runs.compute(replica, 0)[0]))
    return replica.report_data()

  make = lambda i: runs.make(world, i, **options)
  thread = runs.start(make(0), bad_at_first, results[0])
  runs.finish([runs.start(make(1), die, results[1])])
  again = runs.make(world, 1, name="again", **options)
  runs.finish([thread, runs.start(again, come_back, results[2])])
  for result in (results[0], results[2]):
    assert result.error is None
    ((report,),) = [result.value]
    assert report.committed == data.num_samples
    assert not report.skipped
  assert results[0].outcomes[0].reason == "non_finite"
