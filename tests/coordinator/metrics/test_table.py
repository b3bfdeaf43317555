"""The rows of numbers, as every exporter reads them."""

import re

import pytest

from optax_dist.coordinator.metrics import run_numbers, table


def test_a_bucket_holds_what_is_at_most_its_bound():
  result = table.Distribution((1.0, 2.0))
  result.add(2.0, 3)
  result.add(2.5)
  result.add(-1.0)
  assert (result.counts, result.count) == ([1, 3, 1], 5)
  assert result.total == pytest.approx(7.5)


def test_a_distribution_without_bounds_still_counts():
  result = table.Distribution(())
  for value in (0.5, 7.0):
    result.add(value)
  assert (result.counts, result.count, result.total) == ([2], 2, 7.5)


def test_a_row_fits_its_kind_and_name():
  rows = run_numbers.RunNumbers().metrics()
  assert len({row.name for row in rows}) == len(rows)
  for row in rows:
    assert re.fullmatch("[a-z_]+", row.name)
    is_histogram = isinstance(row.value, table.Distribution)
    assert is_histogram == (row.kind == "histogram")
    assert isinstance(row.value, dict) == bool(row.label)
