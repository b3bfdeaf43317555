"""The fault matrix: what its seeds are."""

import collections

from tests.chaos import cases as chaos_cases

# Four of five seeds are cells of the matrix.
MATRIX = [seed for seed in range(9_000) if seed % 5 != 4]


def test_four_of_five_seeds_in_a_row_are_the_whole_matrix():
  cells = [str(chaos_cases.case(seed)) for seed in MATRIX[:110]]
  assert len(set(cells)) == 110
  first = {(c.phase, c.fault) for c in map(chaos_cases.case, MATRIX[:55])}
  assert len(first) == 55


def test_every_fifth_seed_is_an_outage_that_is_longer_than_deadlines():
  cases = [chaos_cases.case(seed) for seed in range(300)]
  outages = [case for case in cases if case.phase == chaos_cases.OUTAGE]
  assert collections.Counter(c.fault for c in outages) == dict.fromkeys(
    chaos_cases.OUTAGES, 20
  )
  shortest = {"pause-all": 7.0, "stop-one": 17.0, "cut-host": 12.0}
  assert all(case.seconds >= shortest[case.fault] for case in outages)
  assert {case.aggregate for case in outages} == {3, 6}


def test_the_same_cell_comes_again_with_other_numbers():
  found = collections.defaultdict(set)
  for seed in MATRIX[7 : 7 + 110 * 60 : 110]:
    case = chaos_cases.case(seed)
    assert str(case) == str(chaos_cases.case(MATRIX[7]))
    for name in ("after", "seconds", "inline", "loopback", "max_staleness"):
      found[name].add(getattr(case, name))
    found["more"].add((case.aggregate, case.data))
  assert found["after"] == {2, 3, 4, 5}
  assert found["seconds"] == {0.3, 1.0, 2.5}
  assert found["inline"] == found["loopback"] == {True, False}
  assert found["max_staleness"] == {0, 1}
  assert len(found["more"]) == 2 * 3


def test_what_small_gradients_never_come_to_has_large_ones():
  for seed in range(330):
    case = chaos_cases.case(seed)
    if case.phase in ("reduce_scatter", "gather", "done"):
      assert not case.inline
