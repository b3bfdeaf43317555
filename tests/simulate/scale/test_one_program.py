"""One program with checkpoints, against Young's and Daly's closed forms."""

import math

import numpy as np
import pytest

from optax_dist.simulate import scale
from tests.simulate.scale.fleets import fleet

SMALL = fleet(
  chips=10,
  per_group=1,
  failure_rate=1e-4,
  repair=20.0,
  detect=5.0,
  restart=10.0,
  restore=5.0,
  save=8.0,
)


@pytest.mark.parametrize("interval", [30.0, 130.0, 600.0])
def test_simulated_goodput_is_dalys(interval):
  found = scale.simulate_fleet(
    scale.one_program(interval), SMALL, seconds=2e7
  ).goodput
  exact = scale.one_program_goodput(
    interval, 8.0, 40.0, SMALL.mean_time_between_failures
  )
  assert found == pytest.approx(exact, rel=0.01)


def test_the_best_interval_is_the_best():
  between = SMALL.mean_time_between_failures
  best = scale.best_checkpoint_interval(8.0, between)
  goodput = lambda interval: scale.one_program_goodput(
    interval, 8.0, 40.0, between
  )
  around = best * np.linspace(0.5, 2, 301)
  assert around[np.argmax([goodput(t) for t in around])] == pytest.approx(
    best, rel=0.01
  )
  named = scale.simulate_fleet(scale.one_program(best), SMALL)
  assert scale.simulate_fleet(scale.one_program(), SMALL) == named


def test_the_best_interval_is_youngs_where_saving_is_short():
  assert scale.best_checkpoint_interval(1e-3, 1e5) == pytest.approx(
    math.sqrt(2 * 1e-3 * 1e5), rel=1e-3
  )
  assert scale.best_checkpoint_interval(5.0, math.inf) == math.inf


def test_without_failures_only_others_are_waited_for():
  calm = fleet(failure_rate=0.0, latency="exponential:1")
  found = scale.simulate_fleet(scale.one_program(), calm)
  expected = 1 / sum(1 / i for i in range(1, 17))
  assert found.goodput == pytest.approx(expected, rel=1e-3)
  assert found.seconds["recovery"] == found.seconds["dropped"] == 0.0


def test_an_interval_must_be_above_0():
  for wrong in (0.0, -1.0, math.inf, math.nan):
    with pytest.raises(ValueError, match="checkpoint_interval"):
      scale.one_program(wrong)
    with pytest.raises(ValueError, match="checkpoint_interval"):
      scale.elastic_restart(wrong)
