"""What the numbers of a configuration mean to the quorum and to who waits."""

import pytest

from optax_dist import ledger, quorum
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.entries import Job, Rules
from optax_dist.coordinator.protocol.policies.policy import Policy


def _config(data=None, policy=None, **rules):
  return Config(Job((), Rules(**rules), data=data), None, policy)


def test_an_empty_gradient_may_be_sent_inline_too():
  """As where all parameters are of size 0: None is not 0 bytes."""
  assert _config(inline_bytes=0).inline
  assert not _config().inline


@pytest.mark.parametrize(
  ("options", "expected"),
  [
    ({}, {"two_phase": True, "lower_on_leave": True, "window": False}),
    # No mean has to be aggregated before the commit.
    ({"inline_bytes": 8}, {"two_phase": False}),
    ({"lower_on_leave": False}, {"lower_on_leave": False}),
    # A loss is a leave without a word.
    (
      {"lower_on_leave": False, "lower_on_loss": True},
      {"lower_on_leave": True},
    ),
    ({"policy": lambda timeout: Policy()}, {"window": True}),
    ({"data": ledger.Batches(8, 4)}, {"exact": False}),
    (
      {
        "data": ledger.Batches(8, 4, micro_batch=1, deterministic=True),
        "replicas_to_aggregate": 4,
        "total_num_replicas": 2,
      },
      {"exact": True},
    ),
    (
      {
        "replicas_to_aggregate": 3,
        "total_num_replicas": 5,
        "max_staleness": 2,
      },
      {
        "replicas_to_aggregate": 3,
        "total_num_replicas": 5,
        "max_staleness": 2,
      },
    ),
  ],
)
def test_the_quorum_begins_as_configured(options, expected):
  state = _config(**options).quorum_state(7)
  assert state.step == 7
  result = state.config._asdict()
  assert {name: result[name] for name in expected} == expected


def test_a_weight_is_one_of_those_that_all_replicas_know():
  weights = [
    _config(weight=weight).quorum_state(0).config.weight
    for weight in (None, "inverse")
  ]
  assert weights == [None, quorum.inverse_staleness]
