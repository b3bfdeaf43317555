"""Metrics of real runs, read from the real HTTP port."""

import os
import threading
import time
import urllib.request

import embedded_runs as runs
import numpy as np
import optax
import pytest
import waiting
from prometheus_client import parser

from optax_dist import coordinator
from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics import prometheus, reporter, table
from optax_dist.coordinator.runtime import endpoint
from optax_dist.coordinator.transport import addresses

ZEROS = np.zeros(1000, np.float32)


def scrape(url):
  """Returns the values at a URL, by name and labels."""
  with urllib.request.urlopen(url, timeout=60) as answer:
    assert answer.headers["Content-Type"].startswith("text/plain")
    text = answer.read().decode()
  return {
    (
      sample.name.removeprefix("optax_dist_"),
      *(value for _, value in sorted(sample.labels.items())),
    ): sample.value
    for family in parser.text_string_to_metric_families(text)
    for sample in family.samples
  }


def test_the_text_is_prometheus():
  seconds = table.Distribution((0.5, 1.0))
  for value in (0.5, 0.75, 3.0):
    seconds.add(value)
  odd = 'a "replica" of \\ and\na line'
  found = {
    "step": {(): 7},
    "step_seconds": {(): seconds},
    "gradients_dropped": {("stale",): 2, ("lost",): 1},
    "membership_changes": {},
    "replica_step": {(odd,): 3},
  }
  server = prometheus.serve(lambda: found, "127.0.0.1", 0)
  try:
    assert server.url.startswith("http://127.0.0.1:")
    assert scrape(server.url) == {
      ("step",): 7,
      ("step_seconds_bucket", "0.5"): 1,
      ("step_seconds_bucket", "1"): 2,
      ("step_seconds_bucket", "+Inf"): 3,
      ("step_seconds_count",): 3,
      ("step_seconds_sum",): 4.25,
      ("gradients_dropped_total", "stale"): 2,
      ("gradients_dropped_total", "lost"): 1,
      ("replica_step", odd): 3,
    }
  finally:
    server.close()
  with pytest.raises(OSError, match="refused"):
    urllib.request.urlopen(server.url, timeout=60)


def test_a_run_reports_itself_while_it_goes_on(tmp_path):
  """What the port says is what the journal says, and what the replicas know."""
  path = tmp_path / "run.jsonl"
  seen = []
  both = threading.Barrier(2)

  def train(replica):
    for _ in range(6):
      replica.step(ZEROS)
    both.wait(60.0)
    if not replica.replica:
      seen.append(scrape(replica.metrics_url))
    both.wait(60.0)
    return replica.stats()

  stats = coordinator.run_embedded(
    train,
    2,
    optax.sgd(0.1),
    ZEROS,
    journal=path,
    metrics_port=0,
    stall_warning=100.0,
  )
  (found,) = seen
  assert found["step",] == found["steps_total",] == 6
  assert found["step_seconds_count",] == 5
  assert found["step_seconds_sum",] > 0
  assert found["gradients_applied_total",] == 12
  assert found["staleness_count",] == found["staleness_bucket", "0"] == 12
  assert found["members",] == 2
  assert found["membership_changes_total", "joined"] == 2
  assert found["leader_changes_total",] == found["stalls_total",] == 0
  assert 0 < found["goodput_ratio",] < 1
  # A gradient out and a mean in for each of six steps; what the last one moved
  # would be told with the next.
  nbytes = journal.read(path).records[0]["gradient_bytes"]
  assert nbytes >= ZEROS.nbytes
  assert found["moved_bytes_total", "out"] == 2 * 5 * nbytes
  assert found["moved_bytes_total", "in"] == 2 * 5 * nbytes
  for i in range(2):
    assert found["replica_step", str(i)] == 6
    assert found["replica_gradients_total", "applied", str(i)] == 6
    assert found["replica_moved_bytes_total", "in", str(i)] == 6 * nbytes
    assert found["replica_waited_seconds_total", str(i)] > 0
    assert stats[i]["bytes_in"] == 6 * nbytes
  assert sorted(found["replica_leads", str(i)] for i in range(2)) == [0, 1]
  commits = [r for r in journal.read(path).records if r["kind"] == "commit"]
  assert found["step_seconds_sum",] == pytest.approx(
    commits[-1]["time"] - commits[0]["time"], abs=1e-3
  )


@pytest.mark.parametrize("with_journal", [False, True])
def test_the_next_leader_goes_on(tmp_path, with_journal):
  """Replicas with ports of their own; the leader is killed after a few steps."""
  path = tmp_path / "run.jsonl" if with_journal else None
  world = endpoint.World()
  results = [runs.Result() for _ in range(3)]
  reporters = [reporter.Reporter(port=0) for _ in range(3)]
  last, ends = [], []
  lock, done = threading.Lock(), threading.Barrier(2)

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
    done.wait(60.0)
    if replica.is_leader:
      last.append(scrape(replica.metrics_url))
    done.wait(60.0)

  try:
    with runs.Faults({("computing", 0, 4): runs.kill}) as faults:
      replicas = [
        runs.make(
          world,
          i,
          k=2,
          n=3,
          journal=path,
          metrics=reporters[i],
          leader_timeout=30.0,
        )
        for i in range(3)
      ]
      threads = [runs.start(replicas[0], train, results[0])]
      waiting.until(lambda: replicas[0].is_leader)
      for one, result in zip(replicas[1:], results[1:], strict=True):
        threads.append(runs.start(one, train, result))
      runs.finish(threads)
  finally:
    for one in reporters:
      one.close()
  assert faults.done == [("computing", 0, 4)]
  (found,) = last
  assert found["step",] >= 12
  assert found["members",] == 2
  if with_journal:
    assert found["membership_changes_total", "lost"] == 1
    assert found["steps_total",] == found["step",]
    # Who asks the next one before it knows of it may take its place at once: it
    # reads the journal before that one's line is in it.
    leaders = [r for r in journal.read(path).records if r["kind"] == "leader"]
    assert 1 <= found["leader_changes_total",] <= len(leaders) - 1
  else:
    assert 0 < found["steps_total",] < found["step",]


def test_a_port_in_use_is_named():
  first = reporter.Reporter(port=0)
  try:
    port = int(first.url.rpartition(":")[2].partition("/")[0])
    with pytest.raises(OSError, match=f"metrics_port.* 127.0.0.1 port {port} "):
      coordinator.run_embedded(
        lambda replica: None, 1, optax.sgd(0.1), ZEROS, metrics_port=port
      )
  finally:
    first.close()


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")
def test_a_forked_child_does_not_keep_the_port():
  # No other process is given it in between.
  (port,) = addresses.free_ports()
  server = prometheus.serve(dict, "127.0.0.1", port)
  ready, go_on = os.pipe(), os.pipe()
  child = os.fork()
  if not child:
    os.write(ready[1], b".")
    os.read(go_on[0], 1)
    os._exit(0)
  try:
    assert os.read(ready[0], 1) == b"."
    server.close()
    again = prometheus.serve(dict, "127.0.0.1", port)
    again.close()
  finally:
    os.write(go_on[1], b".")
    os.waitpid(child, 0)
    for end in (*ready, *go_on):
      os.close(end)
