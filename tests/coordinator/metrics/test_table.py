"""The rows of numbers, as every exporter reads them."""

import re

from optax_dist.coordinator.metrics import run_numbers, table


def test_a_row_fits_its_kind_and_name():
  rows = run_numbers.RunNumbers().metrics()
  assert len({row.name for row in rows}) == len(rows)
  for row in rows:
    assert re.fullmatch("[a-z_]+", row.name)
    is_histogram = isinstance(row.value, table.Distribution)
    assert is_histogram == (row.kind == "histogram")
    assert isinstance(row.value, dict) == bool(row.label)
