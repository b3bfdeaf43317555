"""DiLoCo: periods, and what a failure within one costs."""

import pytest

from optax_dist import simulate
from optax_dist.simulate import scale
from tests.simulate.scale.draws import Draws
from tests.simulate.scale.fleets import fleet


def test_a_longer_period_waits_less_and_loses_more():
  some = fleet(
    latency="exponential:1", nbytes=1.0, network=simulate.Network(0.5)
  )
  short, long = (
    scale.simulate_fleet(scale.diloco(period), some, seconds=20_000.0)
    for period in (1, 50)
  )
  for category in ("waiting", "exchanging"):
    assert long.share(category) < short.share(category)
  assert long.share("dropped") > 5 * short.share("dropped")
  groups = scale.simulate_fleet(scale.replica_groups(), some, seconds=20_000.0)
  assert short.share("exchanging") == pytest.approx(
    groups.share("exchanging"), rel=0.02
  )


@pytest.mark.parametrize("period", [1, 10])
def test_an_exchange_is_paid_once_per_period(period):
  calm = fleet(failure_rate=0.0, network=simulate.Network(0.25))
  shares = scale.simulate_fleet(scale.diloco(period), calm).shares()
  # Steps of 1 s, and half a second for two messages.
  assert shares["exchanging"] == pytest.approx(0.5 / (period + 0.5))
  assert shares["useful"] == pytest.approx(period / (period + 0.5))


@pytest.mark.parametrize(
  ("done", "waits"),
  [
    # Detected before the exchange, 7 s later, or 4 s after it would begin.
    (0.3, 0.0),
    (0.9, 3 * 4.0),
  ],
)
def test_the_others_wait_only_at_an_exchange(done, waits):
  some = fleet(4, 1, repair=10.0, detect=5.0, restart=2.0, catch_up=1.0)
  found = scale.diloco(10)(some, 60.0, Draws([20.0], shares=[done])).seconds
  assert found["waiting"] == pytest.approx(waits)
  # The group loses its steps of this period.
  assert found["dropped"] == pytest.approx(10 * done)
  # It comes back at the next exchange, half a period later on average.
  assert found["recovery"] == pytest.approx(2.0 + 1.0 + 5.0)


@pytest.mark.parametrize("period", [0, -1, 2.0, True, None])
def test_a_period_that_is_none_is_refused(period):
  with pytest.raises(ValueError, match="period must be a positive integer"):
    scale.diloco(period)
