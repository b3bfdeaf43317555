"""Every interleaving of the smallest runs; `--exhaustive` follows larger ones."""

import pytest

from tests.simulation import planted, planted_faults
from tests.simulation.exhaustive import explore

SPACES = {space.name: space for space in explore.SPACES}
START = "2 replicas start and end, nothing goes wrong"
INLINE, EXCHANGED = (
  "2 replicas, 2 steps sent inline, ",
  "2 replicas, 2 steps exchanged, ",
)
SMALL = (
  START,
  *(
    how + what
    for how in (INLINE, EXCHANGED)
    for what in ("nothing goes wrong", "a kill", "a lost answer")
  ),
  "3 replicas, 2 steps sent inline, a lost answer",
  "3 replicas, 2 steps exchanged, nothing goes wrong",
)


@pytest.mark.parametrize("name", SMALL)
def test_no_order_of_events_violates_a_guarantee(name):
  found = explore.explore(SPACES[name], 20_000)
  assert found.complete
  assert found.violations == []
  assert found.states > 20
  # Orders that are left out end no other way.
  full = explore.explore(SPACES[name], 20_000, reduced=False)
  assert full.complete
  assert full.violations == []
  assert full.outcomes == found.outcomes
  if "nothing" in name:
    assert found.states < full.states


# With a space that has it, and the guarantee that it violates.
PLANTED = (
  ("a step is committed before all are done", EXCHANGED + "a kill", "A1"),
  ("what rests on a decision is said", INLINE + "a kill", "A8"),
  ("is sent to the next leader again", INLINE + "a kill", "A7"),
  ("what might not have been", EXCHANGED + "a kill", "A8"),
)


@pytest.mark.parametrize(
  ("fault", "name", "guarantee"), PLANTED, ids=[p[0] for p in PLANTED]
)
def test_what_is_planted_is_found_reduced_or_not(fault, name, guarantee):
  (fault,) = [f for f in planted_faults.FAULTS if fault in f.name]
  with planted.plant(fault):
    reduced = explore.explore(SPACES[name], 20_000)
    full = explore.explore(SPACES[name], 20_000, reduced=False)
  assert reduced.trace
  kinds = [{text[:2] for text in f.violations} for f in (reduced, full)]
  assert guarantee in kinds[0]
  assert kinds[0] == kinds[1]
