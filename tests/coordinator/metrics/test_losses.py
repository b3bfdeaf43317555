"""What losses have cost a run, from handwritten records."""

import pytest

from optax_dist.coordinator.metrics import losses


def _commit(time, compute):
  """A step with a gradient of each replica, which took it so many seconds."""
  members = [
    {"replica": r, "count": 1, "staleness": 0, "compute": c, "age": 0.0}
    for r, c in compute.items()
  ]
  return {"kind": "commit", "time": time, "members": members}


def _steps(times, *replicas):
  return [_commit(t, dict.fromkeys(replicas, 1.0)) for t in times]


def _change(kind, time, *replicas):
  return [{"kind": kind, "time": time, "replica": r} for r in replicas]


def test_losses_before_the_first_or_after_the_last_step_cost_nothing():
  records = [
    *_change("join", 0.0, 0, 1),
    *_change("lost", 1.0, 0),
    *_change("join", 4.0, 0),
    *_steps([10.0, 11.0, 12.0, 13.0], 0, 1),
  ]
  after = [*_change("lost", 13.5, 1)]
  assert losses.of(records + after) is None
  once = [
    *_change("lost", 14.0, 1),
    *_change("join", 14.5, 1),
    *_steps([15.0], 0),
    *_steps([16.0], 0, 1),
  ]
  cost = losses.of(records + _steps([14.0], 0, 1) + once)
  assert cost.losses == 1
  assert cost.seconds == pytest.approx(12.0)
  assert cost.each == pytest.approx(1.0)


def test_replicas_that_join_later_or_leave_are_not_missing():
  cost = losses.of(
    [
      *_change("join", 0.0, 0, 1),
      *_steps([1.0, 2.0, 3.0, 4.0], 0, 1),
      *_change("join", 4.0, 2, 3),
      *_steps([5.0, 6.0, 7.0, 8.0], 0, 1, 2, 3),
      *_change("leave", 8.0, 3),
      *_steps([9.0], 0, 1, 2),
      *_change("lost", 9.0, 2),
      *_steps([10.0], 0, 1),
      *_change("join", 10.0, 2),
      *_steps([11.0], 0, 1, 2),
    ]
  )
  assert cost.seconds == pytest.approx(3 * 2 + 4 * 4 + 3 * 3)
  assert cost.each == pytest.approx(1.0)
  assert cost.bound == pytest.approx(1 - 1 / 31)


def test_partial_round_counts_by_its_fraction():
  """A replica of local steps that joins amid a round of 5 s."""
  cost = losses.of(
    [
      *_change("join", 0.0, 0, 1),
      *(_commit(5.0 * i, {0: 5.0, 1: 5.0}) for i in range(1, 5)),
      *_change("lost", 23.0, 1),
      *_change("join", 23.0, 1),
      _commit(25.0, {0: 5.0, 1: 2.0}),
    ]
  )
  assert cost.bound == 1.0
  assert cost.each == pytest.approx(3.0)


def test_cost_of_a_loss_includes_the_speedup_of_the_others():
  """Three on few cores take 3 s for a gradient, two of them 2 s."""
  cost = losses.of(
    [
      *_change("join", 0.0, 0, 1, 2),
      *(_commit(3.0 * i, dict.fromkeys(range(3), 3.0)) for i in range(1, 6)),
      *_change("lost", 15.0, 2),
      *(_commit(15.0 + 2.0 * i, {0: 2.0, 1: 2.0}) for i in range(1, 6)),
      *_change("join", 25.0, 2),
      _commit(28.0, dict.fromkeys(range(3), 3.0)),
    ]
  )
  assert cost.kept == pytest.approx(cost.bound)
  assert cost.each == pytest.approx(10.0)
