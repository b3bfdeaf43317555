"""Timing in virtual time: known figures, failures, and where time goes."""

import math

import numpy as np
import pytest
import run_journals

from optax_dist import simulate
from optax_dist.coordinator import journal


def _run(strategy, spec, n, **options):
  return simulate.simulate_timing(
    strategy, simulate.parse_latency(spec), n, **options
  )


def _assert_time_adds_up(timing):
  """All of each replica's time has one category, and none is negative."""
  replicas = timing.numbers.replicas
  for replica in replicas:
    seconds = timing.numbers.times.goodput(replica)
    assert min(seconds.seconds.values()) >= 0
    assert seconds.total == pytest.approx(timing.duration)
  total = timing.goodput().total
  assert total == pytest.approx(timing.duration * len(replicas))


@pytest.mark.parametrize(
  ("spec", "k"),
  [
    ("exponential:2", 1),
    ("exponential:2", 16),
    ("shifted-exponential:0.5,2", 8),
    ("lognormal:0,1", 14),
    ("bernoulli:1,5,0.1", 14),
    ("bernoulli:1,5,0.1", 16),
    ("slow-hosts:0.25,5,gamma:2,1", 8),
    ("slow-hosts:0.25,5,gamma:2,1", 14),
  ],
)
def test_step_takes_as_long_as_the_kth_fastest_replica(spec, k):
  """With `cancel`, all replicas start anew at each step."""
  latency, n = simulate.parse_latency(spec), 16
  rng = np.random.default_rng(5)
  draws = [host.draw(rng, 20_000) for host in latency.hosts(n, rng)]
  expected = np.sort(draws, axis=0)[k - 1].mean()
  timing = _run(simulate.sync_replicas(k, cancel=True), spec, n, steps=2000)
  assert 1 / timing.steps_per_second == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(
  ("backups", "at_once", "at_the_end"), [(0, 2.72, 2.73), (4, 1.02, 1.39)]
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
      steps=3000,
    )
    assert 1 / timing.steps_per_second == pytest.approx(seconds, rel=0.02)


def test_asynchronous_replicas_never_wait():
  asynchronous = simulate.sync_replicas(1, max_staleness=None)
  timing = _run(asynchronous, "exponential:2", 50, steps=10_000)
  assert timing.steps_per_second == pytest.approx(25, rel=0.03)
  # In the mean, each of the 49 others has contributed since.
  assert timing.mean_staleness == pytest.approx(49, rel=0.02)
  assert timing.dropped_share == 0
  assert timing.goodput().share("waiting") == 0


def test_tighter_bound_on_staleness_drops_more():
  shares = [
    _run(
      simulate.sync_replicas(1, max_staleness=bound),
      "exponential:1",
      20,
      steps=3000,
    ).dropped_share
    for bound in (0, 20, 60)
  ]
  assert shares == sorted(shares, reverse=True)
  assert shares[0] > 0.5
  assert 0 < shares[-1] < 0.1


def test_replicas_share_a_step_of_more_gradients_than_replicas():
  # Each of 2 replicas computes 3 gradients of a second each.
  timing = _run(simulate.sync_replicas(6), "constant:1", 2, steps=4)
  np.testing.assert_array_equal(timing.commit_times, [3, 6, 9, 12])
  assert [one.accepted for one in timing.numbers.replicas.values()] == [12, 12]
  assert timing.goodput().share("useful") == 1.0


def test_equal_seeds_give_equal_outcomes():
  def run(seed):
    timing = _run(
      simulate.sync_replicas(3),
      "slow-hosts:0.4,3,gamma:2,1",
      5,
      steps=200,
      seed=seed,
      communication=0.1,
    )
    _assert_time_adds_up(timing)
    return timing

  same = lambda a, b: (
    np.array_equal(a.commit_times, b.commit_times)
    and a.goodput() == b.goodput()
  )
  first = run(1)
  assert same(first, run(1))
  assert not same(first, run(2))
  assert first.commit_times.size == first.steps_requested == 200
  assert first.applied == 600


# Failures.


def test_step_with_backups_does_not_wait_for_a_lost_replica():
  failures = simulate.Failures(rate=0.05, downtimes=(7.5,))
  options = {"steps": 400, "seed": 1, "failures": failures}
  backed = _run(simulate.sync_replicas(3), "constant:1", 5, **options)
  alone = _run(simulate.sync_replicas(5), "constant:1", 5, **options)
  assert backed.steps_per_second > 0.7
  assert alone.steps_per_second < 0.3
  for timing in (backed, alone):
    _assert_time_adds_up(timing)
    # 0.05 failures per second up, 7.5 s down: up 1 / (1 + 0.375) of the time.
    assert abs(timing.goodput().share("recovery") - 0.375 / 1.375) < 0.06
    assert timing.goodput().share("dropped") > 0
  assert alone.numbers.replicas[0].dropped["lost"] > 0


def test_simulation_ends_with_its_last_step_if_replicas_never_come_back():
  """Two of three are needed: nothing counts after the second is gone."""
  timing = _run(
    simulate.sync_replicas(2),
    "constant:1",
    3,
    steps=20_000,
    failures=simulate.Failures(0.002, (math.inf,)),
    seed=3,
  )
  assert timing.stopped
  assert timing.commit_times.size < timing.steps_requested == 20_000
  _assert_time_adds_up(timing)
  # A second for each gradient that counted.
  seconds = timing.goodput().seconds
  assert seconds["useful"] == pytest.approx(timing.applied)
  # So is one of each that was dropped; the failures took at most two more.
  lost = sum(one.dropped["lost"] for one in timing.numbers.replicas.values())
  assert 0 <= seconds["dropped"] - (timing.dropped - lost) < 2
  # One is down from its failure on.
  down = sorted(
    timing.numbers.times.goodput(i).seconds["idle"] for i in range(3)
  )
  assert down[1] < 2.0
  assert down[2] > 10.0


def test_simulation_that_takes_all_its_steps_has_not_stopped():
  timing = _run(simulate.sync_replicas(2), "constant:1", 3, steps=4)
  assert timing.commit_times.tolist() == [1, 2, 3, 4]
  assert not timing.stopped


def test_failed_replica_sends_nothing_until_the_failure_is_noticed(tmp_path):
  path, unnoticed = tmp_path / "run.jsonl", 20.0
  with journal.Journal(path) as writer:
    _run(
      simulate.sync_replicas(1),
      "gamma:4,0.25",
      2,
      steps=300,
      failures=simulate.Failures(0.05, (5.0,), unnoticed=(unnoticed,)),
      journal=writer,
    )
  records = run_journals.whole(path)
  failed = {
    (r["replica"], r["incarnation"]): r["time"] - unnoticed
    for r in records
    if r["kind"] == "lost"
  }
  assert len(failed) > 2
  arrived = [
    (member["replica"], member["incarnation"], r["time"] - member["age"])
    for r in records
    if r["kind"] == "commit"
    for member in r["members"]
  ]
  for replica, incarnation, time in arrived:
    assert time <= failed.get((replica, incarnation), math.inf)


@pytest.mark.parametrize("lowers", [False, True])
@pytest.mark.parametrize("k", [3, 4, 7])
def test_time_adds_up_under_failures_of_all_kinds(k, lowers):
  """Also if a replica fails while it computes another gradient of a sum."""
  for seed in range(8):
    timing = _run(
      simulate.sync_replicas(k, max_staleness=seed % 2, cancel=seed % 3 == 0),
      "exponential:1",
      4,
      steps=150,
      communication=0.2 * (seed % 2),
      failures=simulate.Failures(
        0.02, (0.5, 3.0), unnoticed=(0.0, 1.5), lowers=lowers
      ),
      seed=seed,
    )
    _assert_time_adds_up(timing)
    if k > 4 and not timing.stopped:
      # Sums are whole, so that a step may have some more.
      assert timing.applied >= 150 * k


def test_run_in_which_all_replicas_have_left_stops():
  """Where a loss lowers the number of gradients, the last loss ends the run."""
  timing = _run(
    simulate.sync_replicas(1),
    "constant:1",
    1,
    steps=10_000,
    failures=simulate.Failures(0.1, (5.0,), lowers=True),
  )
  assert timing.stopped


@pytest.mark.parametrize("downtime", [math.inf, 1.0])
def test_run_without_a_step_is_an_error(downtime):
  """Replicas that come back, but never finish a gradient, make no step either."""
  with pytest.raises(ValueError, match="no step is ever taken: too few"):
    _run(
      simulate.sync_replicas(1),
      "constant:1000",
      1,
      failures=simulate.Failures(1.0, (downtime,)),
    )


# The journal.


def _journal(path, strategy, spec, n, **options):
  with journal.Journal(path) as writer:
    timing = _run(strategy, spec, n, journal=writer, **options)
  return timing, run_journals.whole(path)


def test_returned_replica_contributes_to_the_present_step(tmp_path):
  timing, records = _journal(
    tmp_path / "run.jsonl",
    simulate.sync_replicas(2),
    "exponential:1",
    3,
    steps=200,
    failures=simulate.Failures(0.1, (3.0,)),
  )
  commits = [r for r in records if r["kind"] == "commit"]
  np.testing.assert_allclose(
    [r["time"] for r in commits], timing.commit_times, atol=1e-6
  )
  assert [r["step"] for r in commits] == list(range(200))
  for record in commits:
    assert [m["staleness"] for m in record["members"]] == [0, 0]
  every = [r for r in records if r["kind"] == "drop"]
  lost = [r for r in every if r["reason"] == "lost"]
  assert timing.dropped == len(every) > len(lost) > 0
  joined = {}
  for record in records:
    if record["kind"] == "join":
      known = joined.get(record["replica"], -1)
      assert record["incarnation"] == known + 1
      joined[record["replica"]] = record["incarnation"]
  assert max(joined.values()) > 3
  for replica in range(3):
    times = [
      one["compute"]
      for one in [*every, *(m for r in commits for m in r["members"])]
      if one["replica"] == replica
    ]
    one = timing.numbers.replicas[replica]
    assert len(times) == one.accepted + one.dropped.total()
    assert 0.4 < np.mean(times) < 1.2


def test_cancelled_computation_has_no_time_in_the_journal(tmp_path):
  _, records = _journal(
    tmp_path / "run.jsonl",
    simulate.sync_replicas(2, cancel=True),
    "exponential:1",
    4,
    steps=50,
  )
  drops = [r for r in records if r["kind"] == "drop"]
  assert len(drops) == 100
  assert {r["compute"] for r in drops} == {None}


@pytest.mark.parametrize(
  ("options", "said"),
  [
    ({"steps": 0}, "`steps` must be a positive integer, got 0"),
    ({"seed": -1}, "`seed` must be"),
    ({"communication": np.nan}, "`communication` must be"),
    (
      {"failures": simulate.Failures(0.0, (1.0,))},
      "`rate` must be finite and positive",
    ),
  ],
)
def test_bad_argument_is_named(options, said):
  with pytest.raises(ValueError, match=said):
    _run(simulate.sync_replicas(1), "constant:1", 2, **options)
