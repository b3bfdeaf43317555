"""Categories of time."""

import pytest

from optax_dist.coordinator.metrics import goodput


def test_categories_add_up():
  found = goodput.make({"useful": 3.0, "idle": 1.0})
  assert set(found.seconds) == set(goodput.CATEGORIES)
  assert found.total == 4.0
  assert found.goodput == 0.75
  assert sum(found.shares().values()) == 1.0
  assert found.report()["shares"]["idle"] == 0.25


def test_nothing_has_no_goodput():
  assert goodput.make({}).goodput == 0.0


def test_an_unknown_category_is_refused():
  with pytest.raises(ValueError, match="got sleeping"):
    goodput.make({"sleeping": 1.0})
