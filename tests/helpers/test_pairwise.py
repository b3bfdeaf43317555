"""Tests of the cases that cover a grid by its pairs."""

import itertools

import hypothesis
import pairwise
from hypothesis import strategies as st

_sizes = st.lists(st.integers(1, 5), min_size=2, max_size=4)


@hypothesis.given(_sizes, st.integers(1, 2))
def test_pairwise_covers_all_values_and_pairs(sizes, strength):
  rows = pairwise.cover(sizes, strength)
  for factors in itertools.combinations(range(len(sizes)), strength):
    wanted = itertools.product(*(range(sizes[i]) for i in factors))
    assert {tuple(row[i] for i in factors) for row in rows} == set(wanted)
