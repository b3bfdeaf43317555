"""All waits increase in one order, whatever the options are."""

import itertools

import pytest

from optax_dist.coordinator.options import Options
from optax_dist.coordinator.protocol import deadlines
from optax_dist.coordinator.transport import interface


@pytest.mark.parametrize(
  ("timeout", "transfer", "silence"),
  list(
    itertools.product(
      (0.01, 1.0, 16.0, 300.0, 1e9),
      (None, 0.01, 10.0, 1e9),
      (None, 0.05, 5.0, 1e9),
    )
  ),
)
def test_timeouts_increase_from_members_to_coordinator_to_replicas(
  timeout, transfer, silence
):
  """Members name who is missing, then the coordinator ends the run."""
  result = deadlines.of(timeout, transfer, silence)
  order = (
    result.transfer,
    result.mean,
    result.round,
    result.timeout,
    result.replica,
  )
  assert order == tuple(sorted(set(order)))
  assert result.silence < result.timeout
  # The coordinator may fail at the very end, and be replaced.
  assert result.replica >= timeout + 2 * result.reconnect


def test_options_decide_all_timeouts():
  assert deadlines.of(300.0, transfer_timeout=4.0).transfer == 4.0
  result = deadlines.of(300.0, silence_timeout=2.0)
  assert (result.reconnect, result.silence) == (2.0, 2.0)
  assert Options(silence_timeout=2.0).silence == interface.fixed(2.0)
  assert Options().silence == deadlines.silence(300.0)
  assert deadlines.of(300.0).silence == deadlines.silence(300.0).ceiling
