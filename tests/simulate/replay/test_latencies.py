"""A journal gives back the run that it recorded."""

import numpy as np
import pytest

from optax_dist import simulate
from optax_dist.coordinator import journal


def _recorded(path, strategy, spec="gamma:4,0.25", n=5, steps=300, **options):
  with journal.Journal(path) as writer:
    timing = simulate.simulate_timing(
      strategy,
      simulate.parse_latency(spec),
      n,
      steps=steps,
      journal=writer,
      **options,
    )
  return timing, simulate.from_journal(journal.read(path, strict=True).records)


@pytest.mark.parametrize("communication", [0.0, 0.2])
@pytest.mark.parametrize("k", [5, 4])
def test_the_recorded_run_is_predicted(tmp_path, k, communication):
  timing, recorded = _recorded(
    tmp_path / "run.jsonl",
    simulate.sync_replicas(k),
    "slow-hosts:0.2,2,gamma:4,0.25",
    communication=communication,
    steps=2000,
  )
  assert recorded.replicas == 5
  assert recorded.strategy.replicas_to_aggregate == k
  assert not recorded.strategy.cancel
  assert recorded.communication == pytest.approx(communication, abs=1e-5)
  assert recorded.steps_per_second == pytest.approx(
    timing.steps_per_second, rel=0.01
  )
  again = simulate.simulate_timing(
    recorded.strategy,
    recorded.latency,
    5,
    steps=2000,
    seed=1,
    communication=recorded.communication,
  )
  assert again.steps_per_second == pytest.approx(
    recorded.steps_per_second, rel=0.03
  )


def test_slow_hosts_are_kept_apart(tmp_path):
  _, recorded = _recorded(
    tmp_path / "run.jsonl",
    simulate.sync_replicas(3),
    "slow-hosts:0.4,10,gamma:4,0.25",
  )
  hosts = recorded.latency.hosts(7, np.random.default_rng(0))
  means = np.array([host.mean for host in hosts])
  assert (means > 5).sum() in (2, 3, 4)
  np.testing.assert_array_equal(means[5:], means[:2])


def test_cancelled_and_late_ones_are_told(tmp_path):
  _, recorded = _recorded(
    tmp_path / "a.jsonl", simulate.sync_replicas(3, cancel=True)
  )
  assert recorded.strategy.cancel
  _, recorded = _recorded(
    tmp_path / "b.jsonl", simulate.sync_replicas(3, max_staleness=2)
  )
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


def test_elastic_exchanges_are_steps_of_one():
  exchange = {"kind": "exchange", "replica": 0, "local_step": 10, "step": 1}
  records = [_run(strategy="elastic_average")]
  records += [
    exchange | {"time": 2.0 * i, "compute": 1.5} for i in range(1, 11)
  ]
  recorded = simulate.from_journal(records)
  assert recorded.strategy.replicas_to_aggregate == 1
  assert recorded.latency.mean == 1.5
  assert recorded.steps_per_second == pytest.approx(0.5)


def test_replicas_that_exchange_together_wait_for_each_other():
  commit = {
    "kind": "commit",
    "time": 1.0,
    "step": 0,
    "members": [
      {"replica": i, "local_step": 0, "compute": 1.0, "arrived": 1.0}
      for i in range(3)
    ],
  }
  run = _run(strategy="elastic_average", replicas_to_aggregate=3)
  recorded = simulate.from_journal([run, commit])
  assert recorded.strategy.kind == "exchange"
  assert recorded.strategy.replicas_to_aggregate == 3
  assert recorded.strategy.max_staleness == 0


def test_a_restarted_run_is_paced_by_its_longest_part():
  commit = {"kind": "commit", "step": 0, "members": []}
  drop = {
    "kind": "drop",
    "step": 0,
    "replica": "a",
    "local_step": 0,
    "count": 1,
    "compute": 0.0,
    "arrived": 1.0,
    "time": 1.0,
  }
  first = [_run()] + [commit | {"time": float(i)} for i in range(3)]
  second = [_run()] + [commit | {"time": 4.0 * i} for i in range(5)]
  recorded = simulate.from_journal([*first, *second, drop])
  assert recorded.steps_per_second == 0.25
  # Rounding must not make a latency 0.
  assert recorded.latency.mean > 0


def test_what_began_late_counts_as_computing():
  """Replica 0 follows its commit by 0.1, 0.1 and 0.5 s, and computes for 1 s."""
  records, end = [_run()], 0.0
  for step, delay in enumerate((0.1, 0.1, 0.5, 0.1)):
    end += delay + 1.0
    member = {"replica": 0, "local_step": step, "compute": 1.0, "arrived": end}
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
    "arrived": end,
    "time": end,
  }
  records += [drop, drop | {"arrived": end + 2.4, "local_step": 4, "step": 5}]
  recorded = simulate.from_journal(records)
  assert recorded.communication == pytest.approx(0.1)
  first, second = recorded.latency.latencies
  np.testing.assert_allclose(first.support, [1.0, 1.0, 1.0, 1.4])
  np.testing.assert_allclose(second.support, [2.0, 2.3])
  # Who was away in between has nothing to be late for.
  back = {"kind": "join", "replica": 1, "time": end, "step": 4}
  recorded = simulate.from_journal([*records[:-1], back, records[-1]])
  np.testing.assert_allclose(recorded.latency.latencies[1].support, [2.0, 2.0])


@pytest.mark.parametrize(
  ("records", "said"),
  [([], "no record of kind 'run'"), ([_run()], "no times of computing")],
)
def test_a_journal_without_a_run_is_refused(records, said):
  with pytest.raises(ValueError, match=said):
    simulate.from_journal(records)
