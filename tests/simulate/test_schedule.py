"""The order of contributions, and exchanges in waves."""

import numpy as np
import pytest

from optax_dist import simulate
from optax_dist.simulate import schedule
from optax_dist.simulate.engines.draws import Draws


def _make(strategy, n=5, seconds=60.0, spec="lognormal:0,1", **options):
  draws = Draws(
    simulate.parse_latency(spec),
    n,
    seed=2,
    local_steps=strategy.local_steps,
  )
  return schedule.make(
    strategy, draws, n, seconds=seconds, steps=10_000, **options
  )


@pytest.mark.parametrize("cancel", [False, True])
@pytest.mark.parametrize("late", [0, 2])
@pytest.mark.parametrize("failures", [None, simulate.Failures(0.1, 2.0)])
def test_a_member_contributes_on_the_parameters_that_it_last_took(
  late, cancel, failures
):
  made = _make(
    simulate.sync_replicas(3, max_staleness=late, cancel=cancel),
    failures=failures,
  )
  steps = len(made.times)
  assert steps > 20
  assert made.times[-1] <= 60
  held = np.zeros(5, int)
  for step in range(steps):
    held[made.restarts[step]] = step
    members = made.members[step]
    assert sorted(set(members)) == members.tolist()
    np.testing.assert_array_equal(held[members], made.local_steps[step])
    assert (step - made.local_steps[step] <= late).all()
    held[members] = step + 1
  assert made.restarts[1:].any()


def test_one_step_is_made_however_long_it_takes():
  made = _make(simulate.sync_replicas(5), spec="constant:3", seconds=1.0)
  assert made.times.tolist() == [3.0]


@pytest.mark.parametrize("failures", [None, simulate.Failures(0.05, 2.0)])
def test_waves_keep_the_order_of_exchanges(failures):
  made = _make(simulate.elastic_average(2), failures=failures)
  waves = schedule.waves(made)
  order = np.concatenate(
    [row[on] for row, on in zip(waves.order, waves.on, strict=True)]
  )
  np.testing.assert_array_equal(order, made.members[:, 0])
  np.testing.assert_array_equal(waves.exchanges, np.cumsum(waves.on.sum(1)))
  np.testing.assert_array_equal(waves.times, made.times[waves.exchanges - 1])
  for row in waves.order:
    assert sorted(row) == list(range(5))
  # Who restarts does so at the same exchange as before.
  begins = np.append(0, waves.exchanges[:-1])
  np.testing.assert_array_equal(waves.restarts, made.restarts[begins])
  assert made.restarts.sum() == waves.restarts.sum()
  assert len(waves.times) < len(made.times)
