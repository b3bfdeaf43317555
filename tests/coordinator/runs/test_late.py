"""A late replica blocks neither the others nor itself."""

import threading
import time

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import waiting

from optax_dist import ledger
from optax_dist.coordinator import strategies


@pytest.mark.parametrize("behind", [2, 5, 12])
def test_a_replica_a_few_steps_behind_catches_up_at_once(behind):
  released, caught_up = threading.Event(), threading.Event()
  # Longer than this test: no wait ends by a deadline.
  slow = {"timeout": 300.0, "transfer_timeout": 100.0, "silence_timeout": 100.0}

  def train(replica, result):
    if replica.replica == 2:
      # Its thread stands still after the second commit.
      replica.step(runs.compute(replica, 0)[0])
      assert released.wait(60.0)
      while replica.global_step < 2 + behind:
        replica.abandon()
        time.sleep(0.005)
      caught_up.set()
      return
    runs.to_step(2 + behind)(replica, result)
    released.set()
    assert caught_up.wait(60.0)

  plan = {("applied", 2, 2): lambda: released.wait(60.0)}
  with runs.Faults(plan):
    results = runs.run(train, 3, k=2, inline_bytes=0, **slow)
  assert [r.error for r in results] == [None] * 3


def test_local_steps_end_once_their_round_is_committed_without_them():
  begun, taken, over = (threading.Event() for _ in range(3))

  def local(opt, quorum):
    return strategies.local_updates(communication_period=6)(opt, quorum)

  def train(replica, result):
    if replica.replica == 0:
      assert begun.wait(60.0)
      runs.to_step(1)(replica, result)
      taken.set()
      assert over.wait(60.0)
      return
    replica.step(runs.compute(replica, 0)[0])
    begun.set()
    assert taken.wait(60.0)
    # It knows that, too.
    waiting.until(lambda: replica.is_stale)
    outcome = replica.step(runs.compute(replica, 1)[0])
    assert (outcome.reason, replica.global_step) == ("stale", 1)
    assert result.computed == 0
    jax.tree.map(np.testing.assert_array_equal, replica.params, replica.center)
    # Of the next round none is missing.
    runs.to_step(2)(replica, result)
    assert result.computed == 6
    over.set()

  results = runs.run(train, 2, k=1, strategy=local)
  assert [r.error for r in results] == [None] * 2


@pytest.mark.parametrize("inline", [True, False])
def test_a_replica_that_joins_after_the_end_has_the_final_state(inline):
  """Others are still there, as after a run that ends with an evaluation."""
  world, results = runs.endpoint.World(), [runs.Result() for _ in range(3)]
  data = ledger.Batches(num_samples=12, global_batch=4, seed=3)
  options = {
    "k": 2,
    "n": 2,
    "data": data,
    "inline_bytes": 64 << 10 if inline else 0,
  }
  ended, over = threading.Barrier(3), threading.Event()

  def train(replica, result):
    for _ in replica.batches():
      replica.step(runs.compute(replica, 0)[0])
    ended.wait(60.0)
    over.wait(60.0)
    return replica.report_data()

  def late(replica, result):
    assert replica.finished
    assert replica.global_step == 3
    assert replica.step(runs.PARAMS).finished
    assert not list(replica.batches())
    return replica.report_data()

  threads = [
    runs.start(runs.make(world, i, **options), train, results[i])
    for i in (0, 1)
  ]
  ended.wait(60.0)
  one = runs.make(world, 2, **options)
  runs.finish([runs.start(one, late, results[2])])
  over.set()
  runs.finish(threads)
  assert [r.error for r in results] == [None] * 3
  assert results[0].value == results[2].value
  jax.tree.map(
    np.testing.assert_array_equal,
    (results[0].params, results[0].opt_state),
    (results[2].params, results[2].opt_state),
  )


def test_late_replica_receives_the_optimizer_state_in_full_precision():
  """Also where `init` returns a narrower dtype than an update."""
  params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), runs.PARAMS)
  options = {"k": 1, "n": 2, "params": params, "opt": runs.widening()}
  world, results = runs.endpoint.World(), [runs.Result(), runs.Result()]
  taken, joined = threading.Event(), threading.Event()

  def first(replica, result):
    for _ in range(3):
      replica.step(jax.tree.map(lambda x: x / 3, replica.params))
    taken.set()
    assert joined.wait(60.0)

  def late(replica, result):
    joined.set()

  threads = [runs.start(runs.make(world, 0, **options), first, results[0])]
  assert taken.wait(60.0)
  threads.append(runs.start(runs.make(world, 1, **options), late, results[1]))
  runs.finish(threads)
  assert [r.error for r in results] == [None] * 2
  states = [jax.tree.leaves(r.opt_state) for r in results]
  assert {x.dtype.name for x in states[0]} == {"float32"}
  jax.tree.map(np.testing.assert_array_equal, *states)
