"""Journals: the run that they recorded, predictions from it, and warnings."""

import numpy as np
import pytest
import run_journals

from optax_dist import simulate
from optax_dist.coordinator import journal


def _records(path, strategy, spec="gamma:4,0.25", n=4, steps=300, **options):
  path.unlink(missing_ok=True)
  with journal.Journal(path) as writer:
    simulate.simulate_timing(
      strategy,
      simulate.parse_latency(spec),
      n,
      steps=steps,
      journal=writer,
      **options,
    )
  return run_journals.whole(path)


@pytest.mark.parametrize("communication", [0.0, 0.2])
@pytest.mark.parametrize("k", [5, 4])
def test_journal_yields_the_recorded_run(tmp_path, k, communication):
  records = _records(
    tmp_path / "run.jsonl",
    simulate.sync_replicas(k),
    "slow-hosts:0.2,2,gamma:4,0.25",
    n=5,
    communication=communication,
    steps=1000,
  )
  recorded = simulate.from_journal(records)
  assert recorded.replicas == 5
  assert recorded.strategy.replicas_to_aggregate == k
  assert not recorded.strategy.cancel
  assert recorded.communication == pytest.approx(communication, abs=1e-5)
  commits = [r["time"] for r in records if r["kind"] == "commit"]
  pace = (len(commits) - 1) / (commits[-1] - commits[0])
  assert recorded.steps_per_second == pytest.approx(pace, rel=0.01)
  means = sorted(times.mean() for times in recorded.latency.seconds)
  assert means[-1] > 1.7 * means[-2]


def test_cancelled_and_late_work_is_part_of_the_strategy(tmp_path):
  records = lambda **options: _records(
    tmp_path / "a.jsonl", simulate.sync_replicas(3, **options)
  )
  recorded = simulate.from_journal(records(cancel=True))
  assert recorded.strategy.cancel
  assert "slow computations are missing" in recorded.warnings[-1]
  recorded = simulate.from_journal(records(max_staleness=2))
  assert recorded.strategy.max_staleness == 2


def _run(**fields):
  return {
    "kind": "run",
    "time": 0.0,
    "strategy": "sync_replicas",
    "replicas_to_aggregate": 1,
    "max_staleness": 0,
    "step": 0,
  } | fields


def test_replicas_that_exchange_together_make_one_step():
  commit = {
    "kind": "commit",
    "time": 1.0,
    "step": 0,
    "members": [
      {"replica": i, "local_step": 0, "compute": 1.0, "age": 0.0}
      for i in range(3)
    ],
  }
  run = _run(strategy="elastic_average", replicas_to_aggregate=3)
  recorded = simulate.from_journal([run, commit])
  assert recorded.strategy.kind == "elastic_average"
  assert recorded.strategy.replicas_to_aggregate == 3
  assert recorded.strategy.max_staleness == 0


def test_pace_of_a_restarted_run_is_that_of_its_longest_part():
  commit = {"kind": "commit", "step": 0, "members": []}
  drop = {
    "kind": "drop",
    "step": 0,
    "replica": "a",
    "local_step": 0,
    "count": 1,
    "compute": 0.0,
    "age": 0.0,
    "time": 1.0,
  }
  first = [_run()] + [commit | {"time": float(i)} for i in range(3)]
  second = [_run()] + [commit | {"time": 4.0 * i} for i in range(5)]
  recorded = simulate.from_journal([*first, *second, drop])
  assert recorded.steps_per_second == 0.25
  # Rounding must not make a latency 0.
  assert all((times > 0).all() for times in recorded.latency.seconds)


def test_late_start_counts_as_compute_time():
  """Replica 0 follows its commit by 0.1, 0.1 and 0.5 s, and computes for 1 s."""
  records, end = [_run()], 0.0
  for step, delay in enumerate((0.1, 0.1, 0.5, 0.1)):
    end += delay + 1.0
    member = {"replica": 0, "local_step": step, "compute": 1.0, "age": 0.0}
    records.append(
      {"kind": "commit", "time": end, "step": step, "members": [member]}
    )
  # A gradient that was dropped is followed by one that began 0.4 s later.
  drop = {
    "kind": "drop",
    "step": 4,
    "replica": 1,
    "local_step": 3,
    "compute": 2.0,
    "age": 0.0,
    "time": end,
  }
  records += [drop, drop | {"time": end + 2.4, "local_step": 4, "step": 5}]
  recorded = simulate.from_journal(records)
  assert recorded.communication == pytest.approx(0.1)
  first, second = recorded.latency.seconds
  np.testing.assert_allclose(first, [1.0, 1.0, 1.4, 1.0])
  np.testing.assert_allclose(second, [2.0, 2.3])
  # A replica that was away in between was not late.
  back = {"kind": "join", "replica": 1, "time": end, "step": 4}
  recorded = simulate.from_journal([*records[:-1], back, records[-1]])
  np.testing.assert_allclose(recorded.latency.seconds[1], [2.0, 2.0])


@pytest.mark.parametrize(
  ("records", "said"),
  [
    ([], "no record of kind 'run'"),
    ([_run()], "no times of computing"),
    ([_run() | {"strategy": "decoupled_diloco"}], "of Decoupled DiLoCo"),
  ],
)
def test_journal_that_allows_no_prediction_is_refused(records, said):
  with pytest.raises(ValueError, match=said):
    simulate.from_journal(records)


# Predictions.


@pytest.mark.parametrize("k", [4, 3, 6])
def test_another_run_of_the_same_kind_is_predicted_within_ten_percent(
  tmp_path, k
):
  first, second = (
    simulate.from_journal(
      _records(
        tmp_path / "run.jsonl",
        simulate.sync_replicas(k),
        "slow-hosts:0.25,2,gamma:4,0.25",
        seed=seed,
        steps=steps,
      )
    )
    for seed, steps in ((7, 300), (8, 900))
  )
  result = simulate.predict(first, repetitions=8)
  assert result.steps_per_second == pytest.approx(
    second.steps_per_second, rel=0.1
  )
  assert result.low < result.steps_per_second < result.high


@pytest.mark.parametrize(
  ("recorded_k", "other_k"), [(3, 4), (3, 2), (4, 3), (4, 6)]
)
def test_another_number_of_gradients_is_predicted(
  tmp_path, recorded_k, other_k
):
  recorded = simulate.from_journal(
    _records(tmp_path / "run.jsonl", simulate.sync_replicas(recorded_k))
  )
  strategy = simulate.sync_replicas(other_k)
  real = simulate.simulate_timing(
    strategy, simulate.parse_latency("gamma:4,0.25"), 4, steps=1000, seed=5
  )
  result = simulate.predict(recorded, strategy, repetitions=4)
  assert result.steps_per_second == pytest.approx(
    real.steps_per_second, rel=0.08
  )


def test_failures_are_part_of_the_prediction(tmp_path):
  path, strategy = tmp_path / "run.jsonl", simulate.sync_replicas(4)
  calm = simulate.from_journal(_records(path, strategy))
  recorded = simulate.from_journal(
    _records(
      path, strategy, failures=simulate.Failures(0.02, (10.0,)), steps=400
    )
  )
  assert recorded.failures.rate == pytest.approx(0.02, rel=0.3)
  assert len(recorded.losses) > 10
  ended = [loss.length for loss in recorded.losses if loss.ended]
  assert ended == pytest.approx([10.0] * len(ended))
  assert recorded.failures.downtimes == pytest.approx(
    [10.0] * len(recorded.losses), rel=0.01
  )
  result = simulate.predict(recorded, repetitions=8)
  assert result.steps_per_second == pytest.approx(
    recorded.steps_per_second, rel=0.15
  )
  assert result.steps_per_second < 0.8 * calm.steps_per_second


def test_longer_journal_gives_a_narrower_interval(tmp_path):
  widths = []
  for steps in (20, 400):
    recorded = simulate.from_journal(
      _records(
        tmp_path / "run.jsonl",
        simulate.sync_replicas(4),
        "lognormal:0,1",
        steps=steps,
      )
    )
    result = simulate.predict(recorded)
    widths.append((result.high - result.low) / result.steps_per_second)
    assert any("too short" in warning for warning in result.warnings) == (
      steps == 20
    )
  assert widths[0] > 2 * widths[1]


def test_a_prediction_with_a_warning_has_no_number(tmp_path):
  recorded = simulate.from_journal(
    _records(tmp_path / "run.jsonl", simulate.sync_replicas(4), steps=150)
  )
  result = simulate.predict(recorded, replicas=8, repetitions=3)
  assert not result.warnings
  assert f"{result.steps_per_second:.4g} steps/s" in str(result)
  crowded = recorded._replace(warnings=("a load of 9 on 2 cores",))
  result = simulate.predict(crowded, replicas=8, repetitions=3)
  assert str(result) == "no prediction (a load of 9 on 2 cores)"
  with pytest.raises(ValueError, match="repetitions"):
    simulate.predict(recorded, repetitions=1)


def test_no_prediction_if_the_recorded_pace_is_not_reproduced(tmp_path):
  """As if something had kept it from taking steps that no record tells."""
  recorded = simulate.from_journal(
    _records(tmp_path / "run.jsonl", simulate.sync_replicas(4))
  )
  slower = recorded._replace(steps_per_second=recorded.steps_per_second / 7.7)
  for strategy in (None, simulate.sync_replicas(3)):
    result = simulate.predict(slower, strategy, repetitions=5)
    (warning,) = result.warnings
    assert "is not in the model" in warning
    assert str(result) == f"no prediction ({warning})"


def test_prediction_says_if_simulations_stopped(tmp_path):
  recorded = simulate.from_journal(
    _records(tmp_path / "run.jsonl", simulate.sync_replicas(4))
  )
  for_good = simulate.Failures(0.05, (float("inf"),))
  result = simulate.predict(recorded._replace(failures=for_good), repetitions=5)
  assert any(
    "in 5 of 5 simulations too few replicas were left" in warning
    for warning in result.warnings
  )


@pytest.mark.parametrize(
  "arguments", [{"replicas": 0}, {"communication": -1.0}]
)
def test_prediction_with_failures_refuses_bad_numbers(tmp_path, arguments):
  """They do not count as simulations in which no step was taken."""
  recorded = simulate.from_journal(
    _records(tmp_path / "run.jsonl", simulate.sync_replicas(4), steps=20)
  )
  failing = recorded._replace(failures=simulate.Failures(0.05, (1.0,)))
  (name,) = arguments
  with pytest.raises(ValueError, match=f"`{name}` must be"):
    simulate.predict(failing, **arguments, repetitions=2)


def test_prediction_without_a_step_is_a_pace_of_zero(tmp_path):
  recorded = simulate.from_journal(
    _records(tmp_path / "run.jsonl", simulate.sync_replicas(4), steps=20)
  )
  at_once = simulate.Failures(1e9, (float("inf"),))
  result = simulate.predict(recorded._replace(failures=at_once), repetitions=2)
  assert result.steps_per_second == 0.0
  assert "in the simulation the run stands still" in result.warnings


def test_more_losses_tell_the_rate_of_failures_better(tmp_path):
  recorded = simulate.from_journal(
    _records(tmp_path / "run.jsonl", simulate.sync_replicas(4), steps=100)
  )
  failures = simulate.Failures(0.05, (10.0,), unnoticed=(0.0,))
  (loss,) = _lossy(_lost(99.0)).losses
  widths = []
  for count in (1, 1000):
    result = simulate.predict(
      recorded._replace(failures=failures, losses=(loss,) * count),
      repetitions=10,
    )
    widths.append(result.high - result.low)
  assert widths[0] > 2 * widths[1]


# Losses of replicas.


def _contribution(replica, time, start=None):
  timings = None
  if start is not None:
    times = dict.fromkeys(("cpu", "compiled", "encoded", "applied"), 0.0)
    timings = times | {"total": time - start}
  return {
    "replica": replica,
    "local_step": 0,
    "compute": 0.5,
    "age": 0.0,
    "timings": timings,
  }


def _commit(time, replicas, start=None):
  members = [_contribution(replica, time, start) for replica in replicas]
  return {"kind": "commit", "time": time, "step": 0, "members": members}


def _lossy(*events):
  """Three replicas take a step each second; and what happens besides."""
  joins = [
    {"kind": "join", "time": 0.0, "replica": i, "address": f"h{i}:1"}
    for i in range(3)
  ]
  commits = [_commit(float(t), [0, 1]) for t in range(1, 101)]
  records = sorted([*commits, *events], key=lambda r: r["time"])
  return simulate.from_journal([_run(), *joins, *records])


def _lost(time, replica=2):
  return {"kind": "lost", "time": time, "replica": replica, "reason": "silent"}


def _back(time, replica=2):
  join = {"kind": "join", "time": time, "replica": replica, "address": "h2:1"}
  return join, _commit(time + 0.25, [0, replica])


def test_loss_has_a_duration():
  recorded = simulate.from_journal(
    [
      _run(lower_on_loss=True),
      {"kind": "join", "time": 0.0, "replica": 0},
      {"kind": "join", "time": 0.0, "replica": 1},
      _commit(1.0, [0, 1]),
      _commit(2.0, [0, 1]),
      _lost(6.0, 1),
      {"kind": "join", "time": 9.0, "replica": 1},
      _commit(10.5, [0, 1], start=9.5),
      _commit(11.5, [0, 1], start=10.5),
      _lost(12.0, 0),
      _commit(14.5, [1]),
    ]
  )
  first, second = recorded.losses
  assert (first.replica, first.ended) == (1, True)
  assert first.unnoticed == pytest.approx(4.0 - 0.5)
  assert first.length == 3.5
  assert (second.replica, second.ended) == (0, False)
  assert second.length == 2.5
  # Two in 6 and 5.5 seconds of replica 1, 12 of replica 0.
  assert recorded.failures.rate == pytest.approx(2 / (6 + 5.5 + 12))
  assert recorded.failures.lowers


def test_departure_does_not_count_as_a_loss():
  leave = {"kind": "leave", "time": 50.0, "replica": 2}
  assert _lossy(leave).losses == ()
  assert _lossy(leave).failures is None


def test_loss_just_before_the_end_barely_affects_the_duration_of_losses():
  """Others took 5 seconds, so this one would have, too."""
  others = [
    event
    for t in (10.0, 30.0, 50.0, 70.0)
    for event in (_lost(t), *_back(t + 5.0))
  ]
  recorded = _lossy(*others, _lost(99.0))
  assert len(recorded.losses) == 5
  assert recorded.failures.downtimes == pytest.approx([5.0] * 4)
  result = simulate.predict(recorded, repetitions=2)
  assert not any("was not back" in warning for warning in result.warnings)


def test_long_absence_at_the_end_keeps_its_share():
  returned = [_lost(10.0), *_back(15.0), _lost(20.0), *_back(25.0)]
  recorded = _lossy(*returned, _lost(40.0))
  assert recorded.failures.downtimes == pytest.approx((5.0, 5.0, 60.0))
  warnings = simulate.predict(recorded, repetitions=2).warnings
  (warning,) = (d for d in warnings if "was not back" in d)
  assert warning.startswith("replica 2 was not back when the journal ended")
  assert "longer than the 60 s" in warning


def test_single_loss_just_before_the_end_does_not_stop_the_prediction():
  recorded = _lossy(_lost(99.0))
  assert all(down < 2.0 for down in recorded.failures.downtimes)
  result = simulate.predict(recorded, repetitions=5)
  assert result.low > 0
  assert any("was not back" in warning for warning in result.warnings)


# Doubts.


def _joined(replica, address):
  return {"kind": "join", "time": 0.0, "replica": replica, "address": address}


def _doubts(end=()):
  """The warnings about a run of one replica on two cores."""
  commit = _commit(1.0, [0], start=0.0)
  records = [_run(cores=2), _joined(0, "h:1"), *[commit] * 40, *end]
  return simulate.from_journal(records).warnings


def test_programs_that_share_cores_are_outside_the_model():
  end = lambda load: [{"kind": "finish", "time": 2.0, "step": 9, "load": load}]
  (line,) = _doubts(end=end(3.1))
  assert line.startswith("outside the model: a load of 3.1 on 2 cores")
  for load in (2.0, None):
    assert _doubts(end=end(load)) == ()


def test_warnings_name_what_a_journal_lacks():
  quiet = [_joined("c", "h:1")]
  assert "no time of computing of replica c" in (_doubts(end=quiet)[0])
  assert any("no timings" in warning for warning in _lossy().warnings)
  recorded = _lossy(_lost(10.0), *_back(15.0))
  few = lambda found: [
    d for d in found.warnings if d.startswith("too few fail")
  ]
  (warning,) = few(simulate.predict(recorded, repetitions=2))
  assert warning.startswith("too few failures: 1, where 10")
  # Not if others are given.
  assert not few(simulate.predict(recorded, failures=None, repetitions=2))
