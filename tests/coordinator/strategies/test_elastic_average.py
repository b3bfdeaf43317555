"""Elastic averaging: one exchange, and runs of several against the same by hand."""

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from local_rounds import INNER, PERIOD, close, local_steps, rounds

from optax_dist.coordinator import strategies
from optax_dist.elastic_exchange import elastic_exchange

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
  assert strategy.settle(shared, after, local, mine=False) is local


@pytest.mark.parametrize("members", [None, 1, 2])
def test_a_synchronous_center_takes_each_pull_that_is_in_the_mean(members):
  strategy = make(synchronous=True)
  shared, _ = away(strategy)
  after = strategy.apply(shared, OWN, *([] if members is None else [members]))
  pulls = 3 if members is None else members
  expected = CENTER + pulls * 0.25 * (OWN - CENTER)
  np.testing.assert_allclose(after.params, expected)


@pytest.mark.parametrize("synchronous", [False, True])
def test_the_strategy_decides_who_exchanges(synchronous):
  """Asynchronous exchanges are one at a time, and never too late."""
  strategy = make(synchronous=synchronous)
  quorum = strategy.quorum
  assert (quorum.replicas_to_aggregate, quorum.total_num_replicas) == (
    (3, 3) if synchronous else (1, 3)
  )
  assert strategy.alone == (not synchronous)
  assert strategy.sums == synchronous
  assert (quorum.max_staleness > 10**6) == (not synchronous)


@pytest.mark.parametrize("inline", [0, 64 << 10], ids=["moved", "inline"])
def test_asynchronous_elastic_averaging(inline, tmp_path):
  path = tmp_path / "run.jsonl"
  strategy = strategies.elastic_average(
    moving_rate=RATE, communication_period=PERIOD
  )
  results = runs.run(
    rounds(4),
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
    own[i], center, *_ = elastic_exchange(own[i], center, RATE)
  assert met == [4] * 3
  for i, result in enumerate(results):
    close(result.value, own[i])
  last = max(results, key=lambda r: r.outcomes[-1].global_step)
  close(last.params, center)


def test_synchronous_elastic_averaging():
  strategy = strategies.elastic_average(
    moving_rate=RATE, communication_period=PERIOD, synchronous=True
  )
  results = runs.run(rounds(3), 3, strategy=strategy, opt=INNER)
  assert [r.error for r in results] == [None] * 3
  center, own = runs.PARAMS, [runs.PARAMS] * 3
  for turn in range(3):
    own = [local_steps(x, i, PERIOD * turn) for i, x in enumerate(own)]
    pulls = [elastic_exchange(x, center, RATE).pull for x in own]
    own = [
      jax.tree.map(lambda a, b: a - b, x, p)
      for x, p in zip(own, pulls, strict=True)
    ]
    center = jax.tree.map(lambda c, *p: c + sum(p), center, *pulls)
  for i, result in enumerate(results):
    close(result.value, own[i])
    close(result.params, center)


def test_a_synchronous_center_is_pulled_by_those_who_are_there():
  strategy = strategies.elastic_average(
    moving_rate=RATE, communication_period=PERIOD, synchronous=True
  )

  def train(replica, result):
    return rounds(1 if replica.replica else 2)(replica, result)

  results = runs.run(train, 2, strategy=strategy, opt=INNER)
  assert [r.error for r in results] == [None] * 2
  one = [local_steps(runs.PARAMS, i, 0) for i in range(2)]
  met = [elastic_exchange(x, runs.PARAMS, RATE) for x in one]
  center = jax.tree.map(
    lambda c, a, b: c + a + b, runs.PARAMS, met[0].pull, met[1].pull
  )
  alone = local_steps(met[0].params, 0, PERIOD)
  close(results[0].params, elastic_exchange(alone, center, RATE).center)


@pytest.mark.parametrize("rate", [0.0, 1.0, 1.5, -0.1, True, np.nan])
def test_a_moving_rate_out_of_range_is_refused(rate):
  with pytest.raises(ValueError, match="moving_rate"):
    strategies.elastic_average(moving_rate=rate)(INNER, strategies.Quorum(2, 2))


@pytest.mark.parametrize(
  ("name", "value"), [("communication_period", 0), ("synchronous", "yes")]
)
def test_arguments_out_of_range_are_refused(name, value):
  with pytest.raises(ValueError, match=name):
    make(**{name: value})
