"""Strategies in the rules' terms."""

import pytest

from optax_dist.simulate import strategy


@pytest.mark.parametrize(
  ("make", "said"),
  [
    (lambda: strategy.sync_replicas(0), "replicas_to_aggregate must be"),
    (lambda: strategy.bounded_staleness(-1), "max_staleness must be"),
    (lambda: strategy.elastic_average(0), "communication_period must be"),
    (lambda: strategy.local_updates(4, True), "communication_period must be"),
    (lambda: strategy.local_updates(4, 2, 4), "replicas_to_aggregate must be"),
  ],
)
def test_a_bad_number_is_named(make, said):
  with pytest.raises(ValueError, match=said):
    make()


def test_backups_are_not_waited_for():
  assert strategy.local_updates(8, 10, 3).replicas_to_aggregate == 5
