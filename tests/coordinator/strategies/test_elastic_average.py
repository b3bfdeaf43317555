"""Elastic averaging: one exchange, and runs of several against the same by hand."""

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from local_rounds import INNER, PERIOD, close, local_steps, rounds

from optax_dist.coordinator import strategies

RATE = 0.3
OWN, CENTER = np.array([4.0, -1.0], np.float32), np.array([0.0, 1.0], "f4")


def make(**options):
  factory = strategies.elastic_average(moving_rate=0.25, **options)
  return factory(optax.sgd(0.1, momentum=0.9), strategies.Quorum(1, 3))


def away(strategy, params=OWN):
  """A center, and a replica's state away from it at the end of a period."""
  shared = strategy.shared(jnp.asarray(CENTER))
  local = strategy.local(shared)
  return shared, local._replace(params=jnp.asarray(params), steps=10)


def test_an_exchange_moves_both_and_keeps_their_sum():
  """The replica is pulled towards the center as it was before its own pull."""
  strategy = make()
  shared, local = away(strategy)
  after = strategy.apply(shared, local.params)
  np.testing.assert_allclose(after.params, [1.0, 0.5])
  settled = strategy.settle(shared, after, local, mine=True)
  np.testing.assert_allclose(settled.params, [3.0, -0.5])
  np.testing.assert_allclose(settled.params + after.params, OWN + CENTER)
  assert settled.steps == 0
  assert settled.opt_state is local.opt_state


def test_the_exchanges_of_others_leave_a_replica_as_it_is():
  """Even if it is at its own exchange, which comes next."""
  strategy = make()
  shared, local = away(strategy)
  after = strategy.apply(shared, jnp.zeros(2))
  settled = strategy.settle(shared, after, local, mine=False)
  jax.tree.map(np.testing.assert_array_equal, settled, local)


def test_exchanges_are_one_at_a_time_and_never_too_late():
  strategy = make()
  assert strategy.quorum[:2] == (1, 3)
  assert strategy.alone
  assert strategy.quorum.max_staleness > 10**6


@pytest.mark.parametrize("inline", [0, 64 << 10], ids=["moved", "inline"])
def test_replicas_exchange_on_their_own_clocks(inline, tmp_path):
  """In few steps: who is far behind on a busy machine gets a snapshot instead."""
  path = tmp_path / "run.jsonl"
  strategy = strategies.elastic_average(
    moving_rate=RATE, communication_period=PERIOD
  )
  results = runs.run(
    rounds(2),
    3,
    strategy=strategy,
    opt=INNER,
    inline_bytes=inline,
    journal=path,
  )
  assert [r.error for r in results] == [None] * 3
  # One exchange at a time, in the order of the commits.
  center, own, met = runs.PARAMS, [runs.PARAMS] * 3, [0] * 3
  for record in runs.records(path):
    if record["kind"] != "commit":
      continue
    (member,) = record["members"]
    i = member["replica"]
    own[i] = local_steps(own[i], i, PERIOD * met[i])
    met[i] += 1
    pull = jax.tree.map(lambda x, c: RATE * (x - c), own[i], center)
    own[i] = jax.tree.map(np.subtract, own[i], pull)
    center = jax.tree.map(np.add, center, pull)
  assert met == [2] * 3
  told = [o.committed for r in results for o in r.outcomes if o.members]
  assert sorted(told) == list(range(1, 7))
  for i, result in enumerate(results):
    close(result.value, own[i])
  last = max(results, key=lambda r: r.outcomes[-1].global_step)
  close(last.params, center)


@pytest.mark.parametrize("rate", [0.0, 1.0, 1.5, -0.1, True, np.nan])
def test_a_moving_rate_out_of_range_is_refused(rate):
  with pytest.raises(ValueError, match="moving_rate"):
    strategies.elastic_average(moving_rate=rate)
