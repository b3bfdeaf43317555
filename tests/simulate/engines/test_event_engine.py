"""Events: failures, returns, sums of gradients, and the journal of it all."""

import numpy as np
import pytest

from optax_dist import simulate
from optax_dist.coordinator import journal


def _run(strategy, spec, n, **options):
  return simulate.simulate_timing(
    strategy, simulate.parse_latency(spec), n, engine="events", **options
  )


def test_more_gradients_than_replicas():
  # Each of 2 replicas brings 3 gradients of a second each.
  timing = _run(simulate.sync_replicas(6), "constant:1", 2, steps=4)
  np.testing.assert_array_equal(timing.commit_times, [3, 6, 9, 12])
  np.testing.assert_array_equal(timing.applied, [12, 12])
  assert timing.shares()["useful"] == 1.0


def test_a_lost_replica_is_not_waited_for_where_there_are_backups():
  failures = simulate.Failures(rate=0.05, downtime=7.5)
  options = {"steps": 400, "seed": 1, "failures": failures}
  backed = _run(simulate.sync_replicas(3), "constant:1", 5, **options)
  alone = _run(simulate.sync_replicas(5), "constant:1", 5, **options)
  assert backed.steps_per_second > 0.7
  assert alone.steps_per_second < 0.3
  for timing in (backed, alone):
    total = sum(timing.seconds.values())
    np.testing.assert_allclose(total, timing.duration)
    assert (timing.seconds["unfinished"] > -1e-6).all()
    # 0.05 failures per second up, 7.5 s down: up 1 / (1 + 0.375) of the time.
    down = timing.shares()["down"]
    assert abs(down - 0.375 / 1.375) < 0.06
    assert timing.shares()["lost"] > 0
  assert alone.lost.sum() > 0


def test_who_comes_back_goes_on_with_the_present_step(tmp_path):
  path = tmp_path / "run.jsonl"
  with journal.Journal(path) as writer:
    timing = _run(
      simulate.sync_replicas(2),
      "exponential:1",
      3,
      steps=200,
      failures=simulate.Failures(0.1, 3.0),
      journal=writer,
    )
  records = journal.read(path, strict=True).records
  commits = [r for r in records if r["kind"] == "commit"]
  np.testing.assert_allclose(
    [r["time"] for r in commits], timing.commit_times, atol=1e-6
  )
  assert [r["step"] for r in commits] == list(range(200))
  for record in commits:
    assert [m["staleness"] for m in record["members"]] == [0, 0]
  every = [r for r in records if r["kind"] == "drop"]
  drops = [r for r in every if r["reason"] != "lost"]
  assert 0 < len(every) - len(drops) <= timing.lost.sum()
  assert len(drops) == timing.dropped.sum() > 0
  joined = {}
  for record in records:
    if record["kind"] == "join":
      known = joined.get(record["replica"], -1)
      assert record["incarnation"] == known + 1
      joined[record["replica"]] = record["incarnation"]
  assert max(joined.values()) > 3
  times = journal.latencies(records)
  for replica in range(3):
    assert len(times[replica]) == timing.applied[replica] + sum(
      r["replica"] == replica for r in every
    )
    assert 0.4 < times[replica].mean() < 1.2


def test_what_is_called_off_has_no_time_in_the_journal(tmp_path):
  path = tmp_path / "run.jsonl"
  with journal.Journal(path) as writer:
    _run(
      simulate.sync_replicas(2, cancel=True),
      "exponential:1",
      4,
      steps=50,
      journal=writer,
    )
  drops = [r for r in journal.read(path).records if r["kind"] == "drop"]
  assert len(drops) == 100
  assert {r["compute"] for r in drops} == {None}


@pytest.mark.parametrize("cancel", [False, True])
def test_a_failure_while_waiting_or_cancelled(cancel):
  """Failures, communication and late gradients all at once add up."""
  timing = _run(
    simulate.sync_replicas(3, max_staleness=1, cancel=cancel),
    "lognormal:0,1",
    6,
    steps=500,
    communication=0.2,
    failures=simulate.Failures(0.2, 1.0),
  )
  total = sum(timing.seconds.values())
  np.testing.assert_allclose(total, timing.duration)
  for cause, seconds in timing.seconds.items():
    assert (seconds > -1e-6).all(), cause
  assert timing.applied.sum() == 1500
