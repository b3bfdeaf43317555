"""Every second of every replica is in exactly one category."""

import threading
import time

import numpy as np
import optax
import pytest

from optax_dist import coordinator, simulate
from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics import run_numbers, time_ledger


def _check(found):
  """Spans follow each other from 0 to the end, and add up."""
  for name in found.replicas:
    now = 0.0
    for span in found.spans(name):
      assert span.replica == name
      assert span.begin == now
      assert span.end > now
      now = span.end
    assert now == pytest.approx(found.end)
  total = found.goodput()
  assert total.total == pytest.approx(found.end * len(found.replicas))
  assert sum(total.shares().values()) == pytest.approx(1.0)
  of_spans = dict.fromkeys(total.seconds, 0.0)
  for span in found.spans():
    of_spans[span.category] += span.end - span.begin
  assert of_spans == pytest.approx(total.seconds)


def _contribution(now, replica, start, end, **told):
  timings = {"total": end - start, "compiled": 0.0, "encoded": 0.0}
  return {
    "replica": replica,
    "local_step": 0,
    "compute": end - start,
    "age": now - end,
    "timings": timings | told,
  }


def test_the_seconds_of_a_small_run_are_those_of_its_records():
  """Two replicas; 1 is lost at 6 s, and back at 8 s."""
  commit = lambda now, *members: {
    "kind": "commit",
    "time": now,
    "step": 0,
    "members": list(members),
  }
  records = [
    {"kind": "run", "time": 0.0},
    {"kind": "join", "time": 0.5, "replica": 0},
    {"kind": "join", "time": 0.5, "replica": 1},
    commit(
      3.25,
      _contribution(3.25, 0, 1.0, 2.0, compiled=0.5),
      _contribution(3.25, 1, 1.0, 3.0),
    ),
    {"kind": "lost", "time": 6.0, "replica": 1, "reason": "killed"},
    {"kind": "join", "time": 8.0, "replica": 1},
    {
      "kind": "drop",
      "time": 5.0,
      **_contribution(5.0, 0, 3.5, 5.0),
      "reason": "stale",
    },
    commit(
      10.0,
      _contribution(10.0, 0, 5.5, 6.5, encoded=0.25),
      _contribution(10.0, 1, 9.0, 10.0),
    ),
    {"kind": "finish", "time": 12.0},
  ]
  # Encoding is no computing.
  records[-2]["members"][0]["compute"] = 0.75
  result = time_ledger.of(records)
  _check(result)
  zero, one = result.goodput(0).seconds, result.goodput(1).seconds
  assert zero == pytest.approx(
    {
      "start": 1.0,
      "compile": 0.5,
      "useful": 0.5 + 0.75,
      "waiting": 1.0 + 3.5,
      "exchanging": 0.5 + 0.5 + 0.25,
      "dropped": 1.5,
      "recovery": 0.0,
      "idle": 2.0,
    }
  )
  # From 3 s on it was lost; that it computed from 3.5 s nobody knows.
  assert one == pytest.approx(
    {
      "start": 1.0,
      "compile": 0.0,
      "useful": 3.0,
      "waiting": 0.0,
      "exchanging": 0.0,
      "dropped": 3.0,
      "recovery": 3.0,
      "idle": 2.0,
    }
  )


def test_absence_is_recovery_even_if_the_replica_is_lost_again():
  lost = {"kind": "lost", "replica": 0, "reason": "killed"}
  join = {"kind": "join", "replica": 0}
  result = time_ledger.of(
    [
      {"kind": "run", "time": 0.0},
      join | {"time": 0.0},
      lost | {"time": 2.0},
      join | {"time": 7.0},
      lost | {"time": 8.0},
      join | {"time": 11.0},
    ]
  )
  _check(result)
  seconds = result.goodput(0).seconds
  assert (seconds["dropped"], seconds["recovery"]) == (3.0, 8.0)


def test_absence_of_a_restarting_replica_is_recovery():
  """It has not joined yet; before its launcher starts it, nobody knows."""
  join = {"kind": "join", "replica": 0, "step": 0}
  process = {"kind": "process", "replica": 0, "host": "a", "pid": 1}
  records = [
    {"kind": "run", "time": 0.0, "step": 0},
    join | {"time": 0.0},
    {"kind": "lost", "replica": 0, "time": 1.0, "reason": "killed"},
    process | {"time": 1.0, "ended": "was ended by SIGKILL"},
    {"kind": "stall", "time": 9.0, "waited": 8.0, "missing": [0]},
  ]
  result = time_ledger.of(records).goodput()
  assert (result.seconds["idle"], result.seconds["recovery"]) == (8.0, 0.0)
  records.insert(4, process | {"time": 1.0, "ended": None})
  result = time_ledger.of(records).goodput()
  assert (result.seconds["idle"], result.seconds["recovery"]) == (0.0, 8.0)
  numbers = run_numbers.RunNumbers()
  numbers.update(records)
  assert numbers.replicas[0].state == "starting"
  numbers.update([join | {"time": 10.0}])
  assert numbers.replicas[0].state == "in"


def test_launcher_record_after_the_run_adds_no_time():
  records = [
    {"kind": "run", "time": 0.0},
    {"kind": "join", "replica": 0, "time": 0.0},
    {"kind": "leave", "replica": 0, "time": 2.0},
  ]
  process = {"kind": "process", "time": 86400.0, "replica": 0, "event": "ended"}
  assert time_ledger.of([*records, process]).end == 2.0


@pytest.mark.parametrize("k", [1, 3, 5])
def test_times_of_a_real_run_add_up(tmp_path, k):
  zeros = np.zeros(3, np.float32)
  together = threading.Barrier(3)
  stepped, late = threading.Event(), threading.Event()

  def train(replica):
    # Of a run of single steps, one that joins late might find only the end.
    together.wait(60.0)
    if k == 1 and replica.replica == 2:
      # Its first gradient is dropped: the others have taken a step before.
      assert stepped.wait(60.0)
    while replica.global_step < 8 and not replica.finished:
      time.sleep(0.01 * (1 + replica.replica))
      if k == 1 and replica.replica < 2 and replica.global_step:
        stepped.set()
        assert late.wait(60.0)
      replica.step(zeros)
      if replica.replica == 2:
        late.set()
    if not replica.finished:
      replica.finish()

  coordinator.run_embedded(
    train,
    3,
    optax.sgd(0.1),
    zeros,
    replicas_to_aggregate=k,
    journal=tmp_path / "run.jsonl",
    timeout=60.0,
  )
  records = journal.read(tmp_path / "run.jsonl").records
  result = time_ledger.of(records)
  _check(result)
  total = result.goodput().seconds
  assert total["useful"] > 0
  assert total["start"] > 0
  drops = [r for r in records if r["kind"] == "drop"]
  assert (total["dropped"] > 0) == bool(drops)
  # With more gradients than replicas, one may come when there are enough.
  assert k == 5 or bool(drops) == (k == 1)


def test_simulated_times_have_the_same_categories(tmp_path):
  with journal.Journal(tmp_path / "run.jsonl") as file:
    timing = simulate.simulate_timing(
      simulate.sync_replicas(3),
      simulate.parse_latency("gamma:4,0.25"),
      4,
      steps=200,
      communication=0.1,
      failures=simulate.Failures(0.01, (5.0,)),
      journal=file,
    )
  result = time_ledger.of(journal.read(tmp_path / "run.jsonl").records)
  _check(result)
  simulated, read = timing.goodput(), result.goodput()
  assert simulated.total == pytest.approx(read.total, rel=0.01)
  for category in ("useful", "dropped", "recovery", "waiting", "exchanging"):
    assert read.share(category) == pytest.approx(
      simulated.share(category), abs=0.03
    )


def test_incremental_counting_equals_counting_the_whole_run(tmp_path):
  """After each record, what was counted so far is what a whole run would have."""
  path = tmp_path / "run.jsonl"
  for _ in range(2):  # The second part is counted for itself.
    with journal.Journal(path) as file:
      simulate.simulate_timing(
        simulate.sync_replicas(3),
        simulate.parse_latency("gamma:4,0.25"),
        4,
        steps=40,
        communication=0.1,
        failures=simulate.Failures(0.05, (5.0,)),
        journal=file,
      )
  records = journal.read(path).records
  times = time_ledger.TimeLedger()
  before = dict.fromkeys(times.booked(), 0.0)
  compared = 0
  for i, record in enumerate(records):
    times.update(record)
    booked = times.booked()
    if record["kind"] != "run":
      assert all(booked[name] >= before[name] for name in booked)
    before = booked
    if i % 25 == 0 and times.goodput().total:
      whole = time_ledger.of(records[: i + 1]).goodput()
      assert times.goodput().seconds == pytest.approx(whole.seconds)
      compared += 1
  assert compared > 5
