"""Tests of the cases that cover a grid by its pairs."""

import itertools

import hypothesis
import pairwise
import pytest
from hypothesis import strategies as st

_sizes = st.lists(st.integers(1, 5), min_size=2, max_size=4)


@hypothesis.given(_sizes, st.integers(1, 2))
def test_all_values_and_all_pairs_are_covered(sizes, strength):
  rows = pairwise.cover(sizes, strength)
  for factors in itertools.combinations(range(len(sizes)), strength):
    wanted = itertools.product(*(range(sizes[i]) for i in factors))
    assert {tuple(row[i] for i in factors) for row in rows} == set(wanted)


@hypothesis.given(_sizes, st.integers(1, 2))
def test_rows_are_distinct_and_the_same_each_time(sizes, strength):
  rows = pairwise.cover(sizes, strength)
  assert rows == sorted(set(rows)) == pairwise.cover(sizes, strength)


@pytest.mark.parametrize(
  ("sizes", "strength", "at_most"),
  [((8, 4), 1, 8), ((2,) * 4, 2, 6), ((8, 2, 4), 2, 32), ((5, 5, 5), 2, 30)],
)
def test_the_cover_is_small(sizes, strength, at_most):
  assert len(pairwise.cover(sizes, strength)) <= at_most


def test_a_factor_without_values_has_no_cases():
  assert pairwise.cover((2, 0), 2) == []


@pairwise.every_value(number=[1, 2, 3], value={"a list": [], "none": None})
def test_values_arrive_under_their_names(request, number, value):
  name = "none" if value is None else "a list"
  assert request.node.name.endswith(f"[{number}-{name}]")
