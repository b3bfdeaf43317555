"""Predictions from journals: how far off, how sure, and what is in doubt."""

import pytest

from optax_dist import simulate
from optax_dist.coordinator import journal


def _records(tmp_path, strategy, spec, n=4, steps=300, name="run", **options):
  path = tmp_path / f"{name}.jsonl"
  with journal.Journal(path) as writer:
    simulate.simulate_timing(
      strategy,
      simulate.parse_latency(spec),
      n,
      steps=steps,
      journal=writer,
      **options,
    )
  return journal.read(path, strict=True).records


@pytest.mark.parametrize("k", [4, 3, 6])
def test_another_run_of_the_same_kind_is_predicted(tmp_path, k):
  strategy, spec = simulate.sync_replicas(k), "slow-hosts:0.25,2,gamma:4,0.25"
  first, second = (
    simulate.from_journal(
      _records(tmp_path, strategy, spec, seed=7, name=name, steps=steps)
    )
    for name, steps in (("a", 300), ("b", 900))
  )
  found = simulate.predict(first, repetitions=20)
  assert found.steps_per_second == pytest.approx(
    second.steps_per_second, rel=0.05
  )
  assert found.low < found.steps_per_second < found.high


@pytest.mark.parametrize(
  ("recorded_k", "other_k"), [(3, 4), (3, 2), (4, 3), (4, 6)]
)
def test_another_k_is_predicted(tmp_path, recorded_k, other_k):
  spec = "gamma:4,0.25"
  recorded = simulate.from_journal(
    _records(tmp_path, simulate.sync_replicas(recorded_k), spec)
  )
  strategy = simulate.sync_replicas(other_k)
  real = simulate.simulate_timing(
    strategy, simulate.parse_latency(spec), 4, steps=3000, seed=5
  )
  found = simulate.predict(recorded, strategy, repetitions=8)
  assert found.steps_per_second == pytest.approx(
    real.steps_per_second, rel=0.08
  )


def test_failures_are_part_of_the_prediction(tmp_path):
  spec, strategy = "gamma:4,0.25", simulate.sync_replicas(4)
  options = {"failures": simulate.Failures(0.02, 10.0), "steps": 400}
  calm = simulate.from_journal(_records(tmp_path, strategy, spec))
  records = _records(tmp_path, strategy, spec, name="faults", **options)
  recorded = simulate.from_journal(records)
  assert recorded.failures.rate == pytest.approx(0.02, rel=0.3)
  assert len(recorded.faults) > 10
  lengths = [f.restarted for f in recorded.faults if f.restarted < 1e9]
  assert lengths == pytest.approx([10.0] * len(lengths))
  found = simulate.predict(recorded, repetitions=20)
  assert found.steps_per_second == pytest.approx(
    recorded.steps_per_second, rel=0.15
  )
  assert found.steps_per_second < 0.8 * calm.steps_per_second


def test_a_longer_journal_is_surer(tmp_path):
  strategy, spec = simulate.sync_replicas(4), "lognormal:0,1"
  widths = []
  for steps in (20, 400):
    recorded = simulate.from_journal(
      _records(tmp_path, strategy, spec, steps=steps, name=str(steps))
    )
    found = simulate.predict(recorded, repetitions=20)
    widths.append((found.high - found.low) / found.steps_per_second)
    assert any("too short" in doubt for doubt in found.doubts) == (steps == 20)
  assert widths[0] > 2 * widths[1]


def test_the_second_half_is_held_out(tmp_path):
  strategy, spec = simulate.sync_replicas(3), "gamma:4,0.25"
  records = _records(tmp_path, strategy, spec, steps=400)
  found = simulate.held_out(records, repetitions=20)
  assert abs(found.error) < 0.08
  assert "the first half predicts" in str(found)
  # The second half is another run, three times slower.
  commits = [r for r in records if r["kind"] == "commit"]
  middle = commits[len(commits) // 2]["time"]
  later = lambda t: t if t <= middle else middle + 3 * (t - middle)
  for record in records:
    record["time"] = later(record["time"])
    for one in record.get("members", ()):
      one["arrived"] = later(one["arrived"])
  slowed = simulate.held_out(records, repetitions=20)
  assert slowed.error == pytest.approx(2.0, rel=0.2)
  assert not slowed.inside
  assert "OUTSIDE" in str(slowed)


def test_nothing_is_held_out_of_a_few_steps(tmp_path):
  records = _records(
    tmp_path, simulate.sync_replicas(3), "gamma:4,0.25", steps=15
  )
  assert simulate.held_out(records) is None
  assert simulate.held_out([]) is None


def test_more_replicas_than_recorded_are_in_doubt(tmp_path):
  records = _records(tmp_path, simulate.sync_replicas(4), "gamma:4,0.25")
  found = simulate.predict(
    simulate.from_journal(records), replicas=8, repetitions=5
  )
  assert "4 replicas were recorded" in found.doubts[-1]
  with pytest.raises(ValueError, match="repetitions"):
    simulate.predict(simulate.from_journal(records), repetitions=1)
