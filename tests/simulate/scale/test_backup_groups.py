"""Backups: steps of the first k groups, against steps drawn one by one."""

import numpy as np
import pytest
from scipy import stats

from optax_dist import simulate
from optax_dist.simulate import scale
from tests.simulate.scale.draws import Draws
from tests.simulate.scale.fleets import fleet


def test_backups_stand_still_as_often_as_too_few_are_there():
  # A group is there 100 s of 125: how many are is binomial.
  some = fleet(repair=20.0, restart=3.0, catch_up=2.0)
  found = scale.simulate_fleet(scale.backup_groups(13), some, seconds=400_000.0)
  there = stats.binom(16, 0.8)
  working = sum(there.pmf(n) * 13 / 16 for n in range(13, 17))
  assert found.goodput == pytest.approx(working, rel=0.02)


@pytest.mark.parametrize("k", [1, 5, 8])
def test_the_late_drop_their_work_and_the_first_wait(k):
  some = fleet(
    8,
    1,
    latency="gamma:2,0.5",
    failure_rate=0.0,
    nbytes=1e6,
    network=simulate.Network(0.05, 1e8),
  )
  shares = scale.simulate_fleet(scale.backup_groups(k), some).shares()
  rng = np.random.default_rng(0)
  times = np.sort(some.step.draw(rng, 8 * 20_000).reshape(-1, 8), axis=1)
  last = times[:, k - 1]
  total = 8 * (last + some.exchange(k)).sum()
  assert shares["useful"] == pytest.approx(times[:, :k].sum() / total, rel=0.01)
  assert shares["dropped"] == pytest.approx(
    (8 - k) * last.sum() / total, rel=0.01
  )
  assert shares["exchanging"] == pytest.approx(
    8 * 20_000 * some.exchange(k) / total, rel=0.01
  )


def test_without_backups_they_are_replica_groups():
  calm = fleet(latency="exponential:1", failure_rate=0.0, nbytes=1e6)
  without = scale.simulate_fleet(scale.backup_groups(16), calm)
  groups = scale.simulate_fleet(scale.replica_groups(), calm)
  assert without.seconds == pytest.approx(groups.seconds)


def test_the_others_wait_for_a_failed_one_only_where_no_backup_is_left():
  some = fleet(3, 1, repair=100.0, detect=4.0)
  draws = Draws([2.0, 3.0], shares=[0.0, 0.0])
  found = scale.backup_groups(2)(some, 20.0, draws).seconds
  # The first failure costs nothing. After the second, at 5 s, one is left: it
  # waits for 4 s until that is known, and then can take no step.
  assert found["waiting"] == 4.0
  assert found["useful"] == pytest.approx(2 * 2 + 2 * 3)
  assert found["dropped"] == pytest.approx(2.0)
  assert found["idle"] == pytest.approx(18.0 + 15.0 + 11.0)


@pytest.mark.parametrize("k", [0, -1, 1.0, True, "2"])
def test_a_number_of_gradients_that_is_none_is_refused(k):
  with pytest.raises(ValueError, match="replicas_to_aggregate must be a pos"):
    scale.backup_groups(k)


def test_more_gradients_than_groups_are_refused():
  with pytest.raises(ValueError, match=r"number of groups \(16\), got 17"):
    scale.simulate_fleet(scale.backup_groups(17), fleet())
