"""Recorded times keep what hung together: over time, and between replicas."""

import numpy as np
import pytest

from optax_dist import simulate


def _recording(slow=0.0, steps=400, replicas=4, block=None):
  """Steps of four replicas; from time to time all are slow for 20 steps."""
  rng = np.random.default_rng(0)
  phase = (np.arange(steps) // 20 % 4 == 0) * slow
  seconds = [
    rng.gamma(16, 1 / 16, steps) * (1 + phase) for _ in range(replicas)
  ]
  ends = np.cumsum(np.max(seconds, axis=0))
  begins = np.concatenate([[0.0], ends[:-1]])
  return simulate.Recording([begins] * replicas, seconds, ends, block)


def test_what_is_drawn_is_what_was_recorded():
  recording = _recording()
  rng = np.random.default_rng(1)
  for host, of_one in zip(
    recording.hosts(4, rng), recording.latencies, strict=True
  ):
    drawn = host.draw(rng, 4000)
    assert np.isin(drawn, of_one.support).all()
    assert drawn.mean() == pytest.approx(of_one.mean, rel=0.03)


def test_all_replicas_are_slow_together():
  recording = _recording(slow=5.0)
  hosts = recording.hosts(4, np.random.default_rng(2))
  drawn = np.stack([host.draw(None, 2000) for host in hosts])
  assert np.corrcoef(drawn)[0, 1] > 0.8
  # A slow phase lasts for some steps.
  assert np.corrcoef(drawn[0, :-3], drawn[0, 3:])[0, 1] > 0.4
  assert recording.block > _recording().block


def test_the_pace_of_correlated_replicas_is_predicted():
  """Drawn one by one, four replicas would seldom all be fast."""
  recording = _recording(slow=5.0)
  real = recording.steps / (recording.marks[-1] - recording.marks[0])
  pace = lambda latency: (
    simulate.simulate_timing(
      simulate.sync_replicas(4), latency, 4, steps=4000
    ).steps_per_second
  )
  assert pace(recording) == pytest.approx(real, rel=0.05)
  alone = simulate.PerHost(recording.latencies)
  assert pace(alone) < 0.8 * real


def test_a_resampled_recording_is_another_one_of_the_same_length():
  recording = _recording(slow=5.0)
  other = recording.resampled(np.random.default_rng(3))
  assert other.steps == recording.steps
  assert other.mean != recording.mean
  means = [
    recording.resampled(np.random.default_rng(i)).mean for i in range(60)
  ]
  assert np.mean(means) == pytest.approx(recording.mean, rel=0.1)
  # Far more doubt than independent times of that number would leave.
  assert np.std(means) > 0.05


def test_further_replicas_are_like_the_first_but_not_the_same():
  hosts = _recording().hosts(8, np.random.default_rng(4))
  first, again = hosts[0].draw(None, 500), hosts[4].draw(None, 500)
  assert not (first == again).all()
  assert first.mean() == pytest.approx(again.mean(), rel=0.1)


def test_few_steps_are_drawn_one_by_one():
  rng = np.random.default_rng(0)
  recording = simulate.Recording([[0.0, 1.0]], [[1.0, 2.0]], [1.0, 3.0])
  (host,) = recording.hosts(1, rng)
  assert set(host.draw(rng, 100)) == {1.0, 2.0}
  assert recording.resampled(rng).steps == 1
  assert str(recording).startswith("1 recorded replicas")


def test_a_replica_that_was_hardly_there_has_times_all_the_same():
  ends = np.arange(1.0, 101.0)
  recording = simulate.Recording(
    [ends - 1, [50.0]], [np.full(100, 0.9), [0.3]], ends
  )
  rng = np.random.default_rng(0)
  hosts = recording.resampled(rng).hosts(2, rng)
  assert set(hosts[1].draw(rng, 5)) == {0.3}


def test_nobody_is_no_recording():
  with pytest.raises(ValueError, match="at least one replica"):
    simulate.Recording([], [], [])
