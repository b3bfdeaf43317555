"""The heap comes to the same outcome as the rules, to the last bit."""

import numpy as np
import pytest

from optax_dist import simulate
from optax_dist.simulate.engines import array_engine, event_engine, heap_engine
from optax_dist.simulate.engines.draws import Draws

N = 9


@pytest.mark.parametrize("communication", [0.0, 0.2])
@pytest.mark.parametrize(
  "spec", ["exponential:1", "constant:1", "bernoulli:1,2,0.4"]
)
def test_equals_the_rules(spec, communication):
  for strategy in (
    simulate.sync_replicas(2),
    simulate.sync_replicas(3, max_staleness=2),
    simulate.bounded_staleness(6),
    simulate.asynchronous(),
  ):
    draws = lambda: Draws(simulate.parse_latency(spec), N, seed=1)
    heap = heap_engine.run(
      strategy, draws(), N, 200, communication, lambda steps: None
    )
    events = event_engine.run(
      strategy, draws(), N, 200, communication=communication
    )
    np.testing.assert_array_equal(heap.commit_times, events.commit_times)
    np.testing.assert_array_equal(heap.applied, events.applied)
    np.testing.assert_array_equal(heap.dropped, events.dropped)
    np.testing.assert_array_equal(heap.staleness, events.staleness)
    for cause in heap.seconds:
      np.testing.assert_allclose(
        heap.seconds[cause], events.seconds[cause], atol=1e-6, err_msg=cause
      )


def test_it_is_taken_where_few_arrive_in_a_step(monkeypatch):
  taken = []
  run = heap_engine.run
  monkeypatch.setattr(
    heap_engine, "run", lambda *args: taken.append(args) or run(*args)
  )
  latency = simulate.parse_latency("exponential:1")
  few, many = simulate.bounded_staleness(50, 2), simulate.sync_replicas(60)
  for strategy in (few, many):
    timing = array_engine.run(strategy, Draws(latency, 100, seed=0), 100, 1200)
    assert len(timing.commit_times) == 1200
  assert [args[0] for args in taken] == [few]
