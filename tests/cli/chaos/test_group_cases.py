"""The matrix of kills: each process, in each phase that it comes to."""

import collections

import pytest

from optax_dist.cli.chaos import group_cases


@pytest.mark.parametrize("processes", [2, 3])
def test_seeds_in_a_row_are_the_whole_matrix(processes):
  cells = group_cases.cells(processes)
  cases = [group_cases.case(seed, processes) for seed in range(len(cells))]
  assert len(set(map(str, cases))) == len(cells)
  # Each process, in each phase that it comes to.
  found = collections.Counter(c.who for c in cases)
  assert len(found) == 2 * processes
  assert found["0.1"] == found["1.1"] == len(group_cases.PHASES) - 2


@pytest.mark.parametrize("processes", [1, 2, 3])
def test_what_only_a_first_process_enters_kills_no_other(processes):
  ranks = collections.defaultdict(set)
  for phase, _, rank in group_cases.cells(processes):
    ranks[phase].add(rank)
  assert "serving" not in ranks
  alone = {"committing", "joining"}
  assert ranks == {
    phase: {0} if phase in alone else set(range(processes))
    for phase in group_cases.PHASES
  }


def test_what_comes_once_is_struck_at_its_first_time():
  number = 2 * len(group_cases.cells(2))
  times = collections.defaultdict(set)
  for seed in range(50 * number):
    case = group_cases.case(seed, 2)
    assert case == group_cases.case(seed, 2)
    assert case.at_start == (case.phase in ("joining", "fetching_snapshot"))
    assert case.by_leader == (case.phase == "committing")
    times[case.phase].add(case.time)
  for phase in ("joining", "fetching_snapshot", "checkpointing"):
    assert times.pop(phase) == {1}
  # The others come again and again: at any of them.
  assert all(found == set(range(1, 31)) for found in times.values())


def test_seeds_beyond_the_matrix_begin_it_anew():
  number = len(group_cases.cells(2))
  for seed in (0, 7, number - 1):
    assert str(group_cases.case(seed, 2)) == str(
      group_cases.case(seed + number, 2)
    )
