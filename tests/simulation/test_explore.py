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
  fault = next(f for f in planted.FAULTS if "unknown answer is" in f.name)
  (space,) = (s for s in SMALL if "lost answer" in s.name)
  with planted.plant(fault):
    found = explore.explore(space, 2000)
  # The lost answers are of puts that landed: it is found where they did not.
  assert found.complete
