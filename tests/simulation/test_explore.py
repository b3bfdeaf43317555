"""Every interleaving of the smallest runs; `--exhaustive` follows larger ones."""

import pytest

from tests.simulation import explore, planted

SMALL = [
  space
  for space in explore.SPACES
  if space.name.startswith("2 replicas, 2 steps")
  and ("nothing" in space.name or space.name.endswith("inline, a lost answer"))
]


@pytest.mark.parametrize("space", SMALL, ids=lambda space: space.name)
def test_no_order_of_events_violates_a_guarantee(space):
  found = explore.explore(space, 2000)
  assert found.complete
  assert found.violations == []
  assert found.states > 40
  assert found.ends >= 1


def test_it_finds_what_is_planted():
  fault = next(f for f in planted.FAULTS if "taken for the commit" in f.name)
  with planted.plant(fault):
    found = explore.explore(SMALL[0], 2000)
  assert found.violations
  assert found.trace
