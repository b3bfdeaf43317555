"""Spans against plain sets of positions."""

import itertools

import hypothesis.strategies as st
from hypothesis import example, given

from optax_dist.ledger import spans as sp

SPANS = st.lists(
  st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=6
).map(lambda pairs: tuple((a, a + n) for a, n in pairs))


def listed(spans):
  return [p for start, stop in spans for p in range(start, stop)]


@given(SPANS, SPANS)
@example(((0, 10),), ((5, 5), (7, 3)))  # Nothing is taken out.
def test_union_and_difference_equal_those_of_sets(a, b):
  both = sp.union(a, b)
  assert listed(both) == sorted({*listed(a), *listed(b)})
  rest = sp.minus(sp.union(a), b)
  for spans in (both, rest):
    assert all(x[1] < y[0] for x, y in itertools.pairwise(spans))
    assert all(start < stop for start, stop in spans)
  assert listed(rest) == sorted({*listed(a)} - {*listed(b)})
  assert sp.overlap(a, b) == bool({*listed(a)} & {*listed(b)})


@given(SPANS, st.integers(0, 40))
def test_head_and_tail_keep_the_order(spans, count):
  all_ = listed(spans)
  count = min(count, len(all_))
  first, rest = sp.head(spans, count)
  assert listed(first) == all_[:count]
  assert listed(rest) == all_[count:]
  assert listed(sp.tail(spans, count)) == all_[len(all_) - count :]
  joined = sp.join(first, rest)
  assert listed(joined) == all_
  assert all(x[1] != y[0] for x, y in itertools.pairwise(joined))
  for part in (first, rest, joined):
    assert all(start < stop for start, stop in part)
  assert sp.size(spans) == len(all_)
