"""Local updates: one round, and runs of several against the same by hand."""

import threading
import time

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import waiting
from local_rounds import INNER, PERIOD, close, local_steps, rounds

from optax_dist import coordinator
from optax_dist.coordinator import strategies


def test_local_updates_have_the_numbers_of_diloco():
  outer = optax.sgd(0.7, momentum=0.9, nesterov=True)
  strategy = strategies.local_updates(outer, communication_period=PERIOD)
  results = runs.run(rounds(3), 2, strategy=strategy, opt=INNER, inline_bytes=0)
  assert [r.error for r in results] == [None] * 2
  center = runs.PARAMS
  velocity = jax.tree.map(jnp.zeros_like, center)
  for turn in range(3):
    changes = [
      jax.tree.map(
        lambda a, b: a - b, center, local_steps(center, i, PERIOD * turn)
      )
      for i in range(2)
    ]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *changes)
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, velocity, mean)
    center = jax.tree.map(
      lambda c, v, g: c - 0.7 * (0.9 * v + g), center, velocity, mean
    )
  for result in results:
    close(result.params, center)
    close(result.value, center)


def test_late_local_updates_begin_again():
  strategy = strategies.local_updates(communication_period=2)
  amid = threading.Event()

  def train(replica, result):
    if replica.replica < 2:
      assert amid.wait(60.0)
      for number in range(4):
        assert replica.step(runs.compute(replica, number)[0]).accepted
      replica.finish()
      return None
    replica.step(runs.compute(replica, 0)[0])
    amid.set()
    waiting.until(lambda: replica.is_stale)
    outcome = replica.step(runs.compute(replica, 1)[0])
    assert outcome.reason in ("stale", "finished")
    assert coordinator.fingerprint(replica.params) == coordinator.fingerprint(
      replica.center
    )
    return None

  results = runs.run(train, 3, k=2, strategy=strategy, opt=INNER)
  assert [r.error for r in results] == [None] * 3


def test_replica_that_joins_amid_a_round_counts_by_its_steps():
  """Replica 1 has taken 2 of 6 steps, so its change has the weight 1/3."""
  strategy = strategies.local_updates(communication_period=6)
  ones = jnp.ones(3)

  def train(replica, result):
    steps = 0
    while replica.global_step < 1:
      if replica.replica == 1 and steps == 1:
        # As if it had joined amid the round, which is about to end.
        replica._participant.inbox.joined.round_ends = time.monotonic()
      outcome = replica.step((1.0 + replica.replica) * ones)
      steps += 1
    assert outcome.members == (0, 1)
    # The next round is a whole one.
    while replica.global_step < 2:
      outcome = replica.step(ones)
      steps += 1
    return steps, np.asarray(replica.center)

  results = runs.run(
    train, 2, strategy=strategy, opt=optax.sgd(0.25), params=0 * ones
  )
  assert [r.error for r in results] == [None] * 2
  first = (1.0 * 0.25 * 6 + 1 / 3 * 2 * 0.25 * 2) / (1.0 + 1 / 3)
  for result, steps in zip(results, (12, 8), strict=True):
    assert result.value[0] == steps
    np.testing.assert_allclose(result.value[1], -first - 0.25 * 6, rtol=1e-6)


@pytest.mark.parametrize(
  "strategy",
  [
    coordinator.local_updates(communication_period=2),
    coordinator.elastic_average(communication_period=2, moving_rate=0.5),
  ],
)
def test_the_first_round_compiles_nothing(strategy):
  """The others would wait: what a replica runs is compiled before it joins."""
  compiled = []

  def count(event, seconds, **_):
    if "compile" in event:
      compiled.append(event)

  # A shape that no other test has.
  params = {"w": jnp.arange(317.0)}
  gradient = jax.jit(lambda p: jax.tree.map(lambda x: 2 * x, p))
  gradient(params)

  def train(replica):
    jax.monitoring.register_event_duration_secs_listener(count)
    try:
      for _ in range(4):
        assert replica.step(gradient(replica.params)).accepted
    finally:
      jax.monitoring.unregister_event_duration_listener(count)

  optimizer = optax.sgd(0.1, momentum=0.9)
  coordinator.run_embedded(train, 1, optimizer, params, strategy=strategy)
  assert not compiled


def test_a_replica_has_one_pending_change():
  with pytest.raises(ValueError, match="replicas_to_aggregate"):
    strategies.local_updates()(INNER, strategies.Quorum(4, 2))
