"""Values of metrics, as every exporter reads them."""

import pytest

from optax_dist.coordinator.metrics import metric


def test_a_bucket_holds_what_is_at_most_its_bound():
  found = metric.Distribution((1.0, 2.0))
  found.add(2.0, 3)
  found.add(2.5)
  found.add(-1.0)
  assert (found.counts, found.count) == ([1, 3, 1], 5)
  assert found.total == pytest.approx(7.5)


def test_a_distribution_without_bounds_still_counts():
  found = metric.Distribution(())
  for value in (0.5, 7.0):
    found.add(value)
  assert (found.counts, found.count, found.total) == ([2], 2, 7.5)


def test_labels_are_texts_whatever_a_replica_is_called():
  """Exporters write them as they are; 3 and "3" would be two values of one."""
  found = metric.by_label("x", "gauge", "What.", "replica", {3: 1.0, "a": 2.0})
  assert [(s.labels, s.value) for s in found.samples] == [
    ({"replica": "3"}, 1.0),
    ({"replica": "a"}, 2.0),
  ]
