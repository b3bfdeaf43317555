"""Timing as a whole: figures that are known, seeds, and refusals."""

import json

import numpy as np
import pytest

from optax_dist import simulate


def _run(strategy, spec, n, **options):
  return simulate.simulate_timing(
    strategy, simulate.parse_latency(spec), n, **options
  )


@pytest.mark.parametrize(
  ("backups", "at_once", "at_the_end"),
  [(0, 2.72, 2.73), (1, 1.83, 2.04), (2, 1.43, 1.72), (4, 1.02, 1.39)],
)
def test_late_replicas_that_drop_their_work_at_once_are_faster(
  backups, at_once, at_the_end
):
  # 8 of 8 + b, exponential(1): H_(8+b) - H_b at once; more if a stale gradient
  # is finished first, as another implementation found.
  for cancel, seconds in ((True, at_once), (False, at_the_end)):
    timing = _run(
      simulate.sync_replicas(8, cancel=cancel),
      "exponential:1",
      8 + backups,
      steps=10_000,
    )
    assert 1 / timing.steps_per_second == pytest.approx(seconds, rel=0.015)


def test_asynchronous_replicas_never_wait():
  timing = _run(simulate.asynchronous(), "exponential:2", 50, steps=50_000)
  assert timing.steps_per_second == pytest.approx(25, rel=0.02)
  # In the mean, each of the 49 others has been in since.
  assert timing.mean_staleness == pytest.approx(49, rel=0.01)
  assert timing.dropped_share == 0


def test_a_tighter_bound_drops_more():
  shares = [
    _run(
      simulate.bounded_staleness(bound), "exponential:1", 20, steps=20_000
    ).dropped_share
    for bound in (0, 10, 20, 60)
  ]
  assert shares == sorted(shares, reverse=True)
  assert shares[0] > 0.5
  assert 0 < shares[-1] < 0.1


def test_long_periods_hide_communication_and_stragglers():
  def gradients_per_second(period):
    timing = _run(
      simulate.local_updates(8, period),
      "exponential:1",
      8,
      steps=2000,
      communication=1.0,
    )
    return timing.gradients_per_second

  one, ten, hundred = map(gradients_per_second, (1, 10, 100))
  # 8 gradients in H_8 + 1 seconds; the best there can be is 8 in a second.
  assert one == pytest.approx(8 / 3.718, rel=0.02)
  assert one < ten < hundred < 8
  elastic = _run(
    simulate.elastic_average(10),
    "exponential:1",
    8,
    steps=2000,
    communication=1.0,
  )
  assert elastic.gradients_per_second == pytest.approx(80 / 11, rel=0.02)


@pytest.mark.parametrize("engine", ["arrays", "events"])
def test_a_seed_gives_the_same_outcome(engine):
  def report(seed):
    timing = _run(
      simulate.sync_replicas(3),
      "slow-hosts:0.4,3,gamma:2,1",
      5,
      steps=200,
      seed=seed,
      engine=engine,
    )
    return json.dumps(timing.report())

  assert report(1) == report(1) != report(2)


def test_the_report_is_json_and_adds_up():
  timing = _run(
    simulate.sync_replicas(3), "exponential:1", 5, steps=100, communication=0.1
  )
  report = json.loads(json.dumps(timing.report(), allow_nan=False))
  assert report["steps_per_second"] == pytest.approx(100 / report["seconds"])
  assert sum(report["time_shares"].values()) == pytest.approx(1)
  applied = sum(report["per_replica"]["applied"])
  dropped = sum(report["per_replica"]["dropped"])
  assert report["dropped_share"] == dropped / (applied + dropped)
  assert report["gradients_per_second"] == applied / report["seconds"]


def test_progress_is_told():
  told = []
  for engine in ("arrays", "events"):
    for strategy in (
      simulate.sync_replicas(2),
      simulate.sync_replicas(2, cancel=True),
      simulate.asynchronous(),
    ):
      told.clear()
      _run(
        strategy,
        "exponential:1",
        3,
        steps=1500,
        engine=engine,
        progress=told.append,
      )
      assert told == sorted(told)
      assert len(told) >= 3
      assert told[-1] <= 1500


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"steps": 0}, "steps must be at least 1, got 0"),
    ({"seed": -1}, "seed must be at least 0"),
    ({"communication": -0.1}, "communication must be at least 0"),
    ({"communication": np.nan}, "communication must be at least 0"),
    ({"failures": simulate.Failures(0.0, 1.0)}, "rate and downtime"),
    (
      {"failures": simulate.Failures(1.0, 1.0), "engine": "arrays"},
      "use engine='events'",
    ),
  ],
)
def test_a_bad_argument_is_named(options, said):
  with pytest.raises(ValueError, match=said):
    _run(simulate.sync_replicas(1), "constant:1", 2, **options)
  with pytest.raises(ValueError, match="replicas must be at least 1"):
    _run(simulate.sync_replicas(1), "constant:1", 0)
