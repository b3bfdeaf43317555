"""The fault matrix: what its seeds are."""

import collections

from optax_dist.cli.chaos import cases as chaos_cases


def test_seeds_in_a_row_are_the_whole_matrix():
  cells = [str(chaos_cases.case(seed)) for seed in range(110)]
  assert len(set(cells)) == 110
  first = {(c.phase, c.fault) for c in map(chaos_cases.case, range(55))}
  assert len(first) == 55


def test_the_same_cell_comes_again_with_other_numbers():
  found = collections.defaultdict(set)
  for seed in range(7, 7 + 110 * 60, 110):
    case = chaos_cases.case(seed)
    assert str(case) == str(chaos_cases.case(7))
    for name in ("after", "seconds", "inline", "loopback", "max_staleness"):
      found[name].add(getattr(case, name))
    found["more"].add((case.everyone, case.data))
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
