"""Metrics of real runs as Prometheus reads them, from their journals."""

import threading
import time

import embedded_runs as runs
import numpy as np
import optax
import pytest
import waiting
from prometheus_client import parser

from optax_dist import coordinator
from optax_dist.cli.runs import journal_tail
from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics import prometheus, table
from optax_dist.coordinator.metrics.run_numbers import RunNumbers
from optax_dist.coordinator.runtime import endpoint

ZEROS = np.zeros(1000, np.float32)


def parsed(values):
  """The values as Prometheus reads their text, by name and labels."""
  text = prometheus.text(values)
  return {
    (
      sample.name.removeprefix("optax_dist_"),
      *(value for _, value in sorted(sample.labels.items())),
    ): sample.value
    for family in parser.text_string_to_metric_families(text)
    for sample in family.samples
  }


def of_journal(path):
  """Returns the metrics of the run in a journal, as Prometheus reads them."""
  numbers = RunNumbers()
  numbers.update(journal_tail.Tail(path).read())
  return parsed(numbers.metrics())


def test_metrics_are_valid_prometheus_text():
  seconds = table.Distribution((0.5, 1.0))
  for value in (0.5, 0.75, 3.0):
    seconds.add(value)
  odd = 'a "replica" of \\ and\na line'
  result = [
    table.Number("step", "gauge", "Steps.", 7),
    table.Number("step_seconds", "histogram", "Seconds.", seconds),
    table.Number(
      "gradients_dropped", "counter", "Why.", {"stale": 2, "lost": 1}, "reason"
    ),
    table.Number("membership_changes", "counter", "How.", {}, "change"),
    table.Number("replica_seconds", "counter", "What for.", {odd: 3}, "name"),
  ]
  assert parsed(result) == {
    ("step",): 7,
    ("step_seconds_bucket", "0.5"): 1,
    ("step_seconds_bucket", "1"): 2,
    ("step_seconds_bucket", "+Inf"): 3,
    ("step_seconds_count",): 3,
    ("step_seconds_sum",): 4.25,
    ("gradients_dropped_total", "stale"): 2,
    ("gradients_dropped_total", "lost"): 1,
    ("replica_seconds_total", odd): 3,
  }


def test_running_job_reports_its_metrics(tmp_path):
  """As the replicas know it."""
  path = tmp_path / "run.jsonl"
  seen = []
  both = threading.Barrier(2)

  def train(replica):
    for _ in range(6):
      replica.step(ZEROS)
    both.wait(60.0)
    if not replica.replica:
      # The line of a step is written after the replicas are notified of it.
      waiting.until(lambda: of_journal(path)["step",] == 6)
      seen.append(of_journal(path))
    both.wait(60.0)
    return replica.stats()

  stats = coordinator.run_embedded(
    train, 2, optax.sgd(0.1), ZEROS, journal=path, stall_warning=100.0
  )
  (result,) = seen
  assert result["step",] == result["steps_total",] == 6
  assert result["step_seconds_count",] == 5
  assert result["step_seconds_sum",] > 0
  assert result["gradients_applied_total",] == 12
  assert result["staleness_count",] == result["staleness_bucket", "0"] == 12
  assert result["members",] == 2
  assert result["membership_changes_total", "joined"] == 2
  assert result["coordinator_restarts_total",] == result["stalls_total",] == 0
  assert 0 < result["goodput_ratio",] < 1
  # A gradient out and a mean in for each of six steps; what the last one moved
  # would be told with the next.
  nbytes = journal.read(path).records[0]["gradient_bytes"]
  assert nbytes >= ZEROS.nbytes
  assert result["moved_bytes_total", "out"] == 2 * 5 * nbytes
  assert result["moved_bytes_total", "in"] == 2 * 5 * nbytes
  for i in range(2):
    assert stats[i]["bytes_in"] == 6 * nbytes
  commits = [r for r in journal.read(path).records if r["kind"] == "commit"]
  assert result["step_seconds_sum",] == pytest.approx(
    commits[-1]["time"] - commits[0]["time"], abs=1e-3
  )


def test_a_killed_replica_is_counted(tmp_path):
  path = tmp_path / "run.jsonl"
  world = endpoint.World()
  results = [runs.Result() for _ in range(3)]
  ends = []
  lock = threading.Lock()

  def train(replica, result):
    while not ends or replica.global_step < ends[0]:
      grads, batch = runs.compute(replica, result.computed)
      result.computed += 1
      replica.step(grads, batch=batch)
      time.sleep(0.002)
      with lock:
        # A step that both have yet to take: one that ended before it would leave
        # the other one to wait for it.
        if faults.done and not ends:
          ends.append(max(12, replica.global_step + 2))

  with runs.Faults({("computing", 0, 4): runs.kill}) as faults:
    replicas = [
      runs.make(world, i, k=2, n=3, journal=path, silence_timeout=30.0)
      for i in range(3)
    ]
    threads = [
      runs.start(one, train, result)
      for one, result in zip(replicas, results, strict=True)
    ]
    runs.finish(threads)
  answer = of_journal(path)
  assert faults.done == [("computing", 0, 4)]
  assert answer["step",] == answer["steps_total",] >= 12
  assert answer["membership_changes_total", "lost"] == 1
  assert answer["coordinator_restarts_total",] == 0
