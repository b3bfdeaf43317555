"""Tests of goodput under failures: closed forms, and the paper's table."""

import math

import pytest

from optax_dist.simulate.decoupled_diloco import (
  YEAR,
  Machines,
  simulate_learners,
)

# By chips and learners, of elastic learners. Its 86 % of 16 learners at 2.4 M chips
# is not here: each has as many chips as one of 8 at 1.2 M, and those have 88 %.
PAPER = {
  (1_200_000, 1): 0.58,
  (1_200_000, 2): 0.70,
  (1_200_000, 8): 0.88,
  (1_200_000, 16): 0.93,
  (2_400_000, 1): 0.40,
  (2_400_000, 8): 0.80,
}


@pytest.mark.parametrize(("chips", "learners"), PAPER)
def test_the_papers_table_within_three_points(chips, learners):
  found = simulate_learners(Machines(chips), learners, duration=3e5)
  assert abs(found.goodput - PAPER[chips, learners]) < 0.03


@pytest.mark.parametrize(
  ("chips", "expected"), [(1_200_000, 0.27), (2_400_000, 0.18)]
)
def test_data_parallelism_that_restarts_within_three_points(chips, expected):
  found = simulate_learners(Machines(chips), elastic=False, duration=3e5)
  assert abs(found.goodput - expected) < 0.03


def test_a_program_that_restarts_is_an_alternating_renewal_process():
  """Up for 1 / rate on average, then down for the restart."""
  machines = Machines(256_000, chip_mtbi=YEAR / 4)
  rate = machines.chips / machines.chip_mtbi
  found = simulate_learners(machines, elastic=False, duration=2e6, seed=1)
  expected = 1 / (1 + rate * machines.restart)
  # Standard error of a share of some 20,000 cycles.
  assert abs(found.goodput - expected) < 0.01
  assert found.uptime == pytest.approx(found.goodput)


def test_learners_have_the_goodput_of_one_with_as_many_times_fewer_chips():
  together = simulate_learners(Machines(819_200), 8, duration=1e6)
  alone = simulate_learners(Machines(102_400), 1, duration=1e6)
  assert abs(together.goodput - alone.goodput) < 0.005


def test_one_of_eight_learners_always_trains():
  assert simulate_learners(Machines(2_400_000), 8, duration=1e5).uptime > 0.9999
  all_of_them = simulate_learners(
    Machines(2_400_000), 8, quorum=8, duration=1e5
  )
  one = simulate_learners(Machines(300_000), 1, duration=1e5)
  assert all_of_them.uptime == pytest.approx(one.uptime**8, abs=0.02)


def test_chips_that_do_not_fail_always_train():
  found = simulate_learners(Machines(512, chip_mtbi=1e15), 2)
  assert found == (1.0, 1.0, 0)


def test_a_slice_that_is_out_is_missed_while_it_is_out():
  """One failure, all of it within the run."""
  machines = Machines(
    512, chip_mtbi=512 * 1e6, slice_return=50.0, downscale=10.0, upscale=5.0
  )
  for seed in range(100):
    found = simulate_learners(machines, duration=1e5, seed=seed)
    if found.interruptions == 2:
      break
  # Two of its slices: 10 s of both, 40 s of one, 5 s of both.
  assert found.goodput == pytest.approx(1 - (10 + 40 / 2 + 5) / 1e5)
  assert found.uptime == pytest.approx(1 - 15 / 1e5)


def test_a_seed_gives_the_same_run():
  run = lambda seed: simulate_learners(
    Machines(1_200_000), 4, duration=1e4, seed=seed
  )
  assert run(3) == run(3) != run(4)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    ({"machines": Machines(0)}, r"machines\.chips must be positive, got 0"),
    ({"machines": Machines(512, restart=-1)}, r"machines\.restart .* got -1"),
    ({"machines": Machines(512), "learners": 0}, "learners .* got 0"),
    (
      {"machines": Machines(512), "learners": 4},
      "no slice of 256 for each of 4",
    ),
    ({"machines": Machines(512), "quorum": 2}, "from 1 to learners=1, got 2"),
    ({"machines": Machines(512), "duration": math.inf}, "duration .* got inf"),
  ],
)
def test_bad_arguments_are_refused(arguments, message):
  with pytest.raises(ValueError, match=message):
    simulate_learners(**arguments)
