"""All replicas die while their coordinator lives, or seem to, and others come."""

import threading

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import waiting

_OPTIONS = {
  "n": 2,
  "k": 1,
  "transfer_timeout": 0.5,
  "silence_timeout": 0.5,
}


def _die_after(world, steps):
  """Two replicas that take so many steps and die; what one had then."""
  answer = []

  def train(replica, result):
    runs.to_step(steps)(replica, result)
    answer.append((replica.params, replica.opt_state, replica.global_step))
    raise runs.Killed

  results = [runs.Result(), runs.Result()]
  threads = [
    runs.start(runs.make(world, i, **_OPTIONS), train, results[i])
    for i in (0, 1)
  ]
  runs.finish(threads)
  assert [type(r.error) for r in results] == [runs.Killed] * 2
  return answer[-1]


@pytest.mark.parametrize(
  ("steps", "has_checkpoint"), [(0, False), (2, False), (2, True)]
)
def test_run_begins_again_from_the_state_that_a_replica_brings(
  steps, has_checkpoint
):
  """No replica has the state of the last step any more."""
  world, result = runs.endpoint.World(), runs.Result()
  params, opt_state, step = _die_after(world, steps)
  assert step >= steps
  state = {"params": params, "opt_state": opt_state, "global_step": step}
  if not has_checkpoint:
    params, opt_state, step = runs.PARAMS, runs.OPT.init(runs.PARAMS), 0
    state = {}
  one = runs.make(world, 2, **_OPTIONS, **state)
  train = lambda replica, result: runs.to_step(step + 1)(replica, result)
  runs.finish([runs.start(one, train, result)])
  assert result.error is None
  # On a busy machine it may have been removed, and have joined again.
  accepted = [o.global_step for o in result.outcomes if o.accepted]
  assert accepted == [step + 1]
  grads = runs.gradient(
    params, jnp.asarray(runs.batch_of(2, result.computed - 1))
  )
  updates, _ = runs.OPT.update(grads, opt_state)
  want = optax.apply_updates(params, updates)
  jax.tree.map(
    lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6),
    result.params,
    want,
  )


@pytest.mark.parametrize("first", [0, 1])
def test_all_replicas_get_the_newest_state_that_any_brings(first):
  """Only one of the hosts has the checkpoints, whichever is the first to call."""
  world, results = runs.endpoint.World(), [runs.Result(), runs.Result()]
  params = jax.tree.map(lambda x: x + 1.0, runs.PARAMS)
  newest = {"params": params, "opt_state": runs.OPT.init(params)}
  newest["global_step"] = 40
  joined = threading.Event()

  def train(replica, result):
    joined.set()
    assert second.wait(60.0)
    runs.to_step(42)(replica, result)

  second, threads = threading.Event(), []
  for i in (first, 1 - first):
    state = newest if i == 0 else {}
    one = runs.make(world, i, **_OPTIONS | {"k": 2}, **state)
    threads.append(runs.start(one, train, results[i]))
    assert joined.wait(60.0)
  second.set()
  runs.finish(threads)
  assert [result.error for result in results] == [None, None]
  accepted = {o.global_step for r in results for o in r.outcomes if o.accepted}
  assert accepted == {41, 42}
  jax.tree.map(np.testing.assert_array_equal, *[r.params for r in results])


def test_run_waits_for_an_evicted_replica_with_the_only_state(caplog):
  """It is evicted, but what it has was committed."""
  still, released = threading.Event(), threading.Event()

  def stand_still():
    still.set()
    assert released.wait(60.0)

  world, results = runs.endpoint.World(), [runs.Result(), runs.Result()]
  options = _OPTIONS | {"inline_bytes": 0}
  replica = lambda i: runs.make(world, i, **options)
  train = runs.to_step(6)
  with runs.Faults({("applied", 0, 3): stand_still}):
    threads = [runs.start(replica(0), train, results[0])]
    assert still.wait(60.0)
    threads.append(runs.start(replica(1), train, results[1]))
    waiting.until(lambda: "waiting for replica 0" in caplog.text)
    released.set()
    runs.finish(threads)
  assert [result.error for result in results] == [None, None]
  assert "begins again" not in caplog.text
  jax.tree.map(np.testing.assert_array_equal, *[r.params for r in results])
  # A replica may be a step further by the time that it knows.
  taken = [o.committed for r in results for o in r.outcomes if o.accepted]
  assert {*taken} == {*range(1, 7)}
