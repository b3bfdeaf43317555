"""Latencies: by name, measured, and recorded."""

import math

import numpy as np
import pytest

from optax_dist import simulate

MEANS = {
  "constant:0.3": 0.3,
  "exponential:2": 2.0,
  "shifted-exponential:0.5,2": 2.5,
  "lognormal:0,1": math.exp(0.5),
  "pareto:1,3": 1.5,
  "gamma:0.5,1": 0.5,
  "bernoulli:1,5,0.1": 1.4,
}


@pytest.mark.parametrize("spec", MEANS)
def test_named_latency_has_its_mean_and_its_name(spec):
  latency = simulate.parse_latency(spec)
  values = latency.draw(np.random.default_rng(0), 200_000)
  assert (values > 0).all()
  error = values.std() / math.sqrt(values.size)
  assert abs(values.mean() - MEANS[spec]) <= 4 * error + 1e-12
  assert str(latency) == spec
  slow = f"slow-hosts:0.25,5,{spec}"
  assert str(simulate.parse_latency(slow)) == slow


def test_slow_hosts_are_slow_for_good():
  latency = simulate.parse_latency("slow-hosts:0.25,10,constant:2")
  hosts = latency.hosts(8, np.random.default_rng(0))
  drawn = [host.draw(np.random.default_rng(1), 3).tolist() for host in hosts]
  assert sorted(drawn) == [[2.0] * 3] * 6 + [[20.0] * 3] * 2


@pytest.mark.parametrize(
  ("text", "said"),
  [
    ("", "a latency is one of constant:t, exponential:mean"),
    ("weibull:1", "got 'weibull'"),
    ("exponential", "takes 1 numbers, exponential:mean; got 0"),
    ("exponential:0", "mean of exponential must be a finite number above 0"),
    ("lognormal:inf,1", "mu of lognormal must be a finite number, got inf"),
    ("shifted-exponential:-1,1", "shift of .* of at least 0, got -1"),
    ("bernoulli:1,2,1.5", "p of bernoulli must be at most 1, got 1.5"),
    ("gamma:1,two", "parameters of a latency are numbers, got 'two'"),
    ("slow-hosts:0.1,3", "slow-hosts takes slow-hosts:share,factor,NAME"),
    (
      "slow-hosts:2,3,constant:1",
      "share of slow-hosts` must be a number from 0 to 1",
    ),
    ("slow-hosts:0.1,-3,constant:1", "factor of slow-hosts` must be finite"),
  ],
)
def test_bad_latency_is_refused_with_what_is_allowed(text, said):
  with pytest.raises(ValueError, match=said):
    simulate.parse_latency(text)


def _recording(slow=0.0, steps=400, replicas=4):
  """Steps of four replicas; from time to time all are slow for 20 steps."""
  rng = np.random.default_rng(0)
  phase = (np.arange(steps) // 20 % 4 == 0) * slow
  seconds = [
    rng.gamma(16, 1 / 16, steps) * (1 + phase) for _ in range(replicas)
  ]
  ends = np.cumsum(np.max(seconds, axis=0))
  begins = np.concatenate([[0.0], ends[:-1]])
  return simulate.Recording([begins] * replicas, seconds, ends)


def test_replicas_that_were_slow_together_are_drawn_slow_together():
  recording = _recording(slow=5.0)
  hosts = recording.hosts(4, np.random.default_rng(2))
  drawn = np.stack([host.draw(None, 2000) for host in hosts])
  assert np.corrcoef(drawn)[0, 1] > 0.8
  # A slow phase lasts for some steps.
  assert np.corrcoef(drawn[0, :-3], drawn[0, 3:])[0, 1] > 0.4
  assert recording.block > _recording().block
  # So the pace is that of the recording.
  real = recording.steps / (recording.marks[-1] - recording.marks[0])
  timing = simulate.simulate_timing(
    simulate.sync_replicas(4), recording, 4, steps=4000
  )
  assert timing.steps_per_second == pytest.approx(real, rel=0.05)


def _drawn_mean(recording, seed):
  rng = np.random.default_rng(seed)
  hosts = recording.hosts(4, rng)
  return np.mean([host.draw(rng, 4000).mean() for host in hosts])


def test_resampled_recordings_differ_as_recordings_would():
  recording = _recording(slow=5.0)
  others = [recording.resampled(np.random.default_rng(i)) for i in range(60)]
  means = [_drawn_mean(other, 7) for other in others]
  assert np.mean(means) == pytest.approx(_drawn_mean(recording, 7), rel=0.1)
  # Much more than different draws from one recording.
  draws = [_drawn_mean(recording, seed) for seed in range(20)]
  assert np.std(means) > 2 * np.std(draws)


def test_replicas_beyond_the_recorded_ones_have_like_times():
  hosts = _recording().hosts(8, np.random.default_rng(4))
  first, again = hosts[0].draw(None, 500), hosts[4].draw(None, 500)
  assert not (first == again).all()
  assert first.mean() == pytest.approx(again.mean(), rel=0.1)


def test_short_recording_is_drawn_one_time_after_the_other():
  rng = np.random.default_rng(0)
  recording = simulate.Recording([[0.0, 1.0]], [[1.0, 2.0]], [1.0, 3.0])
  (host,) = recording.hosts(1, rng)
  assert set(host.draw(rng, 100)) == {1.0, 2.0}
  (host,) = recording.resampled(rng).hosts(1, rng)
  assert set(host.draw(rng, 100)) <= {1.0, 2.0}


def test_replica_with_a_single_gradient_has_a_time_in_each_resample():
  ends = np.arange(1.0, 101.0)
  recording = simulate.Recording(
    [ends - 1, [50.0]], [np.full(100, 0.9), [0.3]], ends
  )
  rng = np.random.default_rng(0)
  hosts = recording.resampled(rng).hosts(2, rng)
  assert set(hosts[1].draw(rng, 5)) == {0.3}


def test_recording_needs_a_replica():
  with pytest.raises(ValueError, match="at least one replica"):
    simulate.Recording([], [], [])


@pytest.mark.parametrize("text", ["lognormal:1000,1", "gamma:1e-300,1"])
def test_times_beyond_all_numbers_are_refused(text):
  """They would be infinite, or always 0."""
  latency = simulate.parse_latency(text)
  strategy = simulate.sync_replicas(1)
  for call in (
    lambda: simulate.simulate_timing(strategy, latency, 2, steps=5),
    lambda: simulate.plan(latency, 2, steps=5),
  ):
    with pytest.raises(ValueError, match=f"the times of {text}.* are too"):
      call()
