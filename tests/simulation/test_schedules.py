"""Schedules of faults, all of whose guarantees hold."""

import pytest

from tests.simulation import bad, faults, fragments, groups, leases, slots

# Schedules of each kind that run here, so many at a time, and the steps that
# each commits at least, on average: most runs come to their end.
_KINDS = {
  "": (faults, 400, 100, 6),
  "--leases": (leases, 160, 80, 5),
  "--slots": (slots, 120, 60, 4),
  "--groups": (groups, 100, 50, 6),
  "--fragments": (fragments, 100, 50, 8),
  "--bad": (bad.plain, 60, 60, 5),
  "--leases --bad": (bad.leased, 80, 40, 4),
  "--slots --bad": (bad.of_slots, 60, 60, 4),
  "--fragments --bad": (bad.of_fragments, 40, 40, 8),
  "--groups --bad": (bad.of_groups, 40, 40, 5),
}
_BATCHES = [
  (options, first)
  for options, (_, count, batch, _) in _KINDS.items()
  for first in range(0, count, batch)
]


@pytest.mark.parametrize(("options", "first"), _BATCHES)
def test_no_guarantee_is_violated(options, first):
  kind, _, batch, average = _KINDS[options]
  wrong = []
  steps = 0
  for seed in range(first, first + batch):
    result = kind.run(kind.schedule(seed))
    steps += result.steps
    if result.violation:
      wrong.append((seed, result.violation))
  command = f"python -m tests.simulation {options} --replay"
  assert not wrong, f"{command} {wrong[0][0]}: {wrong}"
  assert steps > average * batch


def test_same_seed_repeats_the_same_run():
  for seed in (2, 3, 4, 7):
    once, again = (
      faults.run(faults.schedule(seed), trace=True) for _ in range(2)
    )
    assert once.trace == again.trace
    assert once.steps
