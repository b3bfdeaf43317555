"""Both engines come to the same outcome on the same draws, to the last bit."""

import numpy as np
import pytest

from optax_dist import simulate
from optax_dist.simulate.engines import array_engine

N = 7
STRATEGIES = [
  simulate.sync_replicas(N),
  simulate.sync_replicas(5),
  simulate.sync_replicas(5, cancel=True),
  simulate.sync_replicas(1),
  simulate.sync_replicas(4, max_staleness=1),
  simulate.sync_replicas(4, max_staleness=1, cancel=True),
  simulate.sync_replicas(1, max_staleness=2, cancel=True),
  simulate.asynchronous(),
  simulate.bounded_staleness(5),
  simulate.bounded_staleness(3, 2),
  simulate.elastic_average(3),
  simulate.local_updates(N, 3, backups=1),
]
# Continuous; some hosts slow; all at once; many at once.
LATENCIES = [
  "exponential:1",
  "slow-hosts:0.3,5,gamma:2,1",
  "constant:1",
  "bernoulli:1,2,0.4",
]


def _assert_same(a, b):
  np.testing.assert_array_equal(a.commit_times, b.commit_times)
  np.testing.assert_array_equal(a.applied, b.applied)
  np.testing.assert_array_equal(a.dropped, b.dropped)
  np.testing.assert_array_equal(a.staleness, b.staleness)
  for cause in a.seconds:
    np.testing.assert_allclose(
      a.seconds[cause], b.seconds[cause], atol=1e-6, err_msg=cause
    )


@pytest.mark.parametrize("communication", [0.0, 0.3])
@pytest.mark.parametrize("spec", LATENCIES)
def test_equals_the_rules(spec, communication):
  for strategy in STRATEGIES:
    arrays, events = (
      simulate.simulate_timing(
        strategy,
        simulate.parse_latency(spec),
        N,
        steps=150,
        seed=5,
        communication=communication,
        engine=engine,
      )
      for engine in ("arrays", "events")
    )
    _assert_same(arrays, events)
    # All of every replica's time is accounted for.
    assert (arrays.seconds["unfinished"] > -1e-6).all()
    total = sum(arrays.seconds.values())
    np.testing.assert_allclose(total, arrays.duration)
    k = strategy.replicas_to_aggregate
    assert arrays.applied.sum() == arrays.staleness.sum() == 150 * k


def test_simulations_side_by_side_are_those_one_by_one():
  strategy = simulate.sync_replicas(1)
  ks, n, steps = [2, 4, 5], 5, 50
  table = np.random.default_rng(0).exponential(1.0, (3 * n, 200))
  at = np.zeros(3 * n, int)

  def taker(offset):
    used = at.copy()

    def take(who):
      used[offset + who] += 1
      return table[offset + who, used[offset + who] - 1]

    return take

  together = array_engine.Lots(
    strategy, 3, n, taker(0), 0.1, replicas_to_aggregate=np.array(ks)
  )
  times = np.stack([together.commit() for _ in range(steps)])
  for i, k in enumerate(ks):
    alone = array_engine.Lots(
      simulate.sync_replicas(k), 1, n, taker(i * n), 0.1
    )
    one_by_one = [alone.commit()[0] for _ in range(steps)]
    np.testing.assert_array_equal(times[:, i], one_by_one)
    part = slice(i * n, (i + 1) * n)
    np.testing.assert_array_equal(together.applied[part], alone.applied)
    np.testing.assert_array_equal(together.dropped[part], alone.dropped)
