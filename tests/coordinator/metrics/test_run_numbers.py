"""Tests of a run's metrics, from handwritten records."""

from optax_dist.coordinator.metrics import run_numbers


def values(numbers):
  """Returns what is reported, by name and labels."""
  return {
    (name, *labels): value
    for name, cells in numbers.metrics().items()
    for labels, value in cells.items()
  }


def member(replica, staleness=0, count=1, moved=(0, 0)):
  return {
    "replica": replica,
    "count": count,
    "staleness": staleness,
    "compute": 0.5,
    "arrived": None,
    "timings": None
    if moved is None
    else {
      "start": 0.0,
      "sent": 0.5,
      "compiled": 0.0,
      "encoded": 0.0,
      "bytes_in": moved[0],
      "bytes_out": moved[1],
    },
  }


def commit(step, time, *members):
  return {"kind": "commit", "step": step, "time": time, "members": members}


def test_the_numbers_of_a_small_run_are_those_of_its_records():
  numbers = run_numbers.RunNumbers()
  for record in (
    {"kind": "run", "time": 0.0, "step": 10},
    {"kind": "leader", "time": 0.0, "replica": 0, "step": 10},
    *({"kind": "join", "time": 0.1, "replica": i} for i in range(3)),
    commit(10, 1.0, member(0, moved=(3, 4)), member(1, staleness=3, count=2)),
    {"kind": "drop", "time": 1.5, "reason": "stale", **member(2, moved=(0, 4))},
    {"kind": "stall", "time": 2.0, "waited": 1.0},
    {"kind": "stall", "time": 3.0, "waited": 2.0},
    {"kind": "lost", "time": 3.5, "replica": 0},
    {"kind": "abandon", "time": 3.5},
    {"kind": "leader", "time": 3.5, "replica": 1, "step": 11},
  ):
    numbers.update(record)
  found = values(numbers)
  assert found["stalled_seconds",] == 2.0
  assert found["stalls",] == 1
  assert found["step",] == 11
  assert found["steps",] == 1
  assert found["gradients_applied",] == 3
  assert found["gradients_dropped", "stale"] == 1
  assert found["staleness",].counts[:4] == [1, 0, 0, 2]
  assert found["staleness",].total == 6
  assert found["moved_bytes", "in"] == 3
  assert found["moved_bytes", "out"] == 8
  assert found["members",] == 2
  assert found["membership_changes", "joined"] == 3
  assert found["membership_changes", "lost"] == 1
  assert found["attempts_abandoned",] == 1
  assert found["leader_changes",] == 1
  # The new leader writes a commit that the journal has, and goes on.
  numbers.update(commit(10, 1.0, member(0), member(1)))
  numbers.update(commit(11, 4.0, member(1, moved=None), member(2)))
  found = values(numbers)
  assert found["steps",] == 2
  assert found["step_seconds",].count == 1
  assert found["step_seconds",].total == 3.0
  assert found["stalled_seconds",] == 0
  assert found["gradients_applied",] == 5
  assert not numbers.finished
  numbers.update({"kind": "finish", "time": 5.0})
  assert numbers.finished
  assert values(numbers)["members",] == 0
  useful = values(numbers)["replica_seconds", "useful"]
  assert 0 < values(numbers)["goodput_ratio",] < 1
  assert useful > 0
  # A resumed run counts from its own start.
  numbers.update({"kind": "run", "time": 0.0, "step": 5})
  found = values(numbers)
  assert (found["step",], found["steps",]) == (5, 0)
  assert not numbers.finished
  assert found["replica_seconds", "useful"] == 0


def test_elastic_averaging_has_exchanges():
  numbers = run_numbers.RunNumbers()
  exchange = {"kind": "exchange", "time": 1.0, "replica": 0, "compute": 0.5}
  numbers.update(exchange | {"arrived": None})
  assert values(numbers)["gradients_applied",] == 1


def test_a_replica_that_joined_before_the_first_record_is_known_by_its_gradients():
  """As for a new leader that has no journal."""
  numbers = run_numbers.RunNumbers()
  numbers.update({"kind": "lost", "time": 0.5, "replica": 0})
  numbers.update(commit(40, 1.0, member(0), member(1), member(2)))
  assert values(numbers)["members",] == 2
