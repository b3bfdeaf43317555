"""Tests of the committed positions, and of their report by samples."""

import pytest

from optax_dist import ledger


def test_what_was_committed_is_not_committed_again():
  progress = ledger.Progress().commit(((0, 4), (8, 10)))
  assert progress == ledger.Progress(10, ((4, 8),))
  assert progress.done == 6
  for spans in (((9, 11),), ((0, 1),)):
    with pytest.raises(ValueError, match="in a committed step before"):
      progress.commit(spans)
    assert not progress.is_open(spans)
  assert progress.is_open(((4, 8), (10, 99)))
  assert progress.commit(((4, 8),), ((10, 12),)) == ledger.Progress(
    12, (), ((10, 12),)
  )


def test_the_report_names_what_could_not_be():
  data = ledger.Batches(10, 4, shuffle=False, epochs=2)
  progress = ledger.Progress().commit(((0, 2), (4, 10)), ((2, 3),))
  first, second = ledger.report(data, progress)
  assert first == ledger.EpochReport(0, 6 + 0, (8, 9), (2,), (3,))
  assert second == ledger.EpochReport(1, 2, (8, 9), (), (2, 3, 4, 5, 6, 7))


def test_an_endless_run_reports_the_epochs_that_have_begun():
  data = ledger.Batches(4, 4, epochs=None, mode="streaming", shuffle=False)
  assert ledger.report(data, ledger.Progress()) == ()
  assert len(ledger.report(data, ledger.Progress(5))) == 2
