"""Values of metrics, as every exporter reads them."""

import re

import pytest

from optax_dist.coordinator.metrics import run_numbers, table


def test_a_bucket_holds_what_is_at_most_its_bound():
  found = table.Distribution((1.0, 2.0))
  found.add(2.0, 3)
  found.add(2.5)
  found.add(-1.0)
  assert (found.counts, found.count) == ([1, 3, 1], 5)
  assert found.total == pytest.approx(7.5)


def test_a_distribution_without_bounds_still_counts():
  found = table.Distribution(())
  for value in (0.5, 7.0):
    found.add(value)
  assert (found.counts, found.count, found.total) == ([2], 2, 7.5)


def test_the_table_has_what_is_reported_and_no_more():
  values = run_numbers.RunNumbers().metrics()
  assert list(values) == [row.name for row in table.TABLE]
  for row, found in table.rows(values):
    assert all(len(key) == len(row.labels) for key in found)
    assert re.fullmatch("[a-z_]+", row.name)
    kinds = {isinstance(x, table.Distribution) for x in found.values()}
    assert kinds <= {row.kind == "histogram"}


def test_labels_are_texts_whatever_a_replica_is_called():
  """Exporters write them as they are; 3 and "3" would be two values of one."""
  assert table.by_label({3: 1.0, "a": 2.0}) == {("3",): 1.0, ("a",): 2.0}
