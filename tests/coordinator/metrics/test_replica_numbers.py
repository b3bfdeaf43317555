"""The metrics of a replica, among those of others in the same process."""

import pytest

from optax_dist.coordinator.metrics import replica_numbers, table

_COUNTS = {
  "step": 7,
  "leads": True,
  "gradients": {"applied": 5, "stale": 2},
  "bytes_in": 30,
  "bytes_out": 40,
  "waited": 1.5,
  "rejoins": 2,
}


def _values(found):
  return {
    (name, *labels): value
    for name, cells in found.items()
    for labels, value in cells.items()
  }


@pytest.mark.parametrize("replica", [2, "two"])
def test_each_count_is_under_its_name(replica):
  found = replica_numbers.metrics(replica, **_COUNTS)
  name = str(replica)
  assert _values(found) == {
    ("replica_step", name): 7,
    ("replica_leads", name): 1,
    ("replica_gradients", name, "applied"): 5,
    ("replica_gradients", name, "stale"): 2,
    ("replica_moved_bytes", name, "in"): 30,
    ("replica_moved_bytes", name, "out"): 40,
    ("replica_waited_seconds", name): 1.5,
    ("replica_rejoins", name): 2,
  }


def test_what_may_become_less_is_no_counter():
  """A monitor takes a counter that has become less for a new process."""
  found = table.rows(replica_numbers.metrics(0, **_COUNTS))
  gauges = {row.name for row, _ in found if row.kind == "gauge"}
  # A replica that rejoins a run that began anew goes back to its first step.
  assert gauges == {"replica_step", "replica_leads"}
