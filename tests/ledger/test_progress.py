"""Tests of the committed positions, and of their report by samples."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from optax_dist import ledger

STEPS = st.lists(
  st.tuples(
    st.sets(st.integers(0, 20), min_size=1), st.sets(st.integers(0, 20))
  ),
  max_size=6,
)


def spans_of(positions):
  return tuple((p, p + 1) for p in sorted(positions))


def listed(spans):
  return {p for start, stop in spans for p in range(start, stop)}


@given(STEPS, st.sets(st.integers(-1, 25)))
def test_progress_equals_that_of_sets(steps, asked):
  progress, done, given_up = ledger.Progress(), set(), set()
  for step, skipped in steps:
    skipped -= step
    arguments = spans_of(step), spans_of(skipped)
    again = progress.with_(*arguments)
    if done & (step | skipped):
      with pytest.raises(ValueError, match="in a committed step before"):
        progress.commit(*arguments)
      either = done | step | skipped
      assert again.next == max(either) + 1
      assert listed(again.open) == set(range(again.next)) - either
      continue
    progress = progress.commit(*arguments)
    assert progress == again
    done |= step | skipped
    given_up |= skipped
    assert progress.next == max(done) + 1
    assert listed(progress.open) == set(range(progress.next)) - done
    assert listed(progress.skipped) == given_up
    assert progress.done == len(done)
  free = all(p >= 0 and p not in done for p in asked)
  assert progress.is_open(spans_of(asked)) == free
  # A span may reach beyond what has begun.
  behind = ((p, 99) for p in range(30))
  for span in behind:
    assert progress.is_open((span,)) == all(p < span[0] for p in done)
  data = ledger.Batches(8, 4, epochs=3, shuffle=False, mode="streaming")
  for epoch, report in enumerate(ledger.report(data, progress)):
    here = set(range(8 * epoch, 8 * epoch + 8))
    assert set(report.skipped) == {p % 8 for p in given_up & here}
    assert set(report.open) == {p % 8 for p in here - done}
    assert report.committed == len((done - given_up) & here)


def test_report_names_skipped_and_open_samples():
  data = ledger.Batches(10, 4, shuffle=False, epochs=2)
  progress = ledger.Progress().commit(((0, 2), (4, 10)), ((2, 3),))
  first, second = ledger.report(data, progress)
  assert first == ledger.EpochReport(0, 6 + 0, (8, 9), (2,), (3,))
  assert second == ledger.EpochReport(1, 2, (8, 9), (), (2, 3, 4, 5, 6, 7))
