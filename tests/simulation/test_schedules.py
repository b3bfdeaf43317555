"""Schedules of faults, all of whose guarantees hold; `faults` has what happens."""

import pytest

from tests.simulation import faults

_BATCH = 250


@pytest.mark.parametrize("batch", range(8))
def test_no_guarantee_is_violated(batch):
  bad = []
  steps = 0
  for seed in range(batch * _BATCH, (batch + 1) * _BATCH):
    result = faults.run(faults.schedule(seed))
    steps += result.steps
    if result.violation:
      bad.append((seed, result.violation))
  assert not bad, f"python -m tests.simulation --replay {bad[0][0]}: {bad}"
  assert steps > 8 * _BATCH  # Most runs come to their end.


def test_a_seed_is_the_same_run_again():
  for seed in (3, 11, 19):
    once, again = (
      faults.run(faults.schedule(seed), trace=True) for _ in range(2)
    )
    assert once.trace == again.trace
    assert once.steps
