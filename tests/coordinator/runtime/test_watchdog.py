"""Tests that a stuck training loop is reported, and its replica evicted."""

import errno
import functools
import os
import re
import sys
import threading

import numpy as np
import optax
import pytest
import run_journals
from waiting import until

from optax_dist import coordinator
from optax_dist.coordinator.protocol import deadlines
from optax_dist.coordinator.runtime import timings, watchdog
from optax_dist.coordinator.transport.interface import fixed

RULE = deadlines.steps(300.0)


def watching(limit, awaited, evict):
  """The watchdog of a replica that has just begun a step."""
  stopwatch = timings.Stopwatch()
  stopwatch.begin(True)
  stopwatch.step = object()
  return watchdog.Watchdog(limit, stopwatch, "replica 7", awaited, evict)


def test_default_limit_follows_step_times_and_is_shorter_if_others_wait():
  stopwatch, now = timings.Stopwatch(), 100.0
  steps = watchdog.Steps(RULE, stopwatch)
  assert steps.deadline == 180.0
  for _ in range(100):
    stopwatch.step = object()
    steps.lasts(now)
    stopwatch.step = None
    steps.lasts(now + 7.0)
    now += 100.0
  assert 70.0 <= steps.deadline <= 74.0
  stopwatch.step = object()
  steps.lasts(now)
  assert steps.is_stuck(steps.lasts(now + 80.0), awaited=True)
  assert not steps.is_stuck(steps.lasts(now + 3000.0), awaited=False)
  assert steps.is_stuck(steps.lasts(now + 3700.0), awaited=False)


def test_time_asleep_does_not_count(monkeypatch):
  """As after SIGSTOP and SIGCONT."""
  times, evicted = [0.0], threading.Event()

  def look():
    times[0] += 0.01 if len(times) > 50 else 6000.0
    times.append(times[0])
    return times[0]

  awake = functools.partial(watchdog.AwakeClock, source=look)
  monkeypatch.setattr(watchdog, "AwakeClock", awake)
  dog = watching(fixed(0.8), lambda: True, lambda *_: evicted.set())
  dog._every = 1e-3
  dog.start()
  assert evicted.wait(60.0)
  dog.close()
  assert len(times) > 100


def test_watched_thread_is_first_in_the_printed_stacks(monkeypatch):
  # Other tests may have left threads, whose stacks would take the room.
  monkeypatch.setattr(watchdog, "_MAX_STACK_CHARS", 1 << 24)
  event, inside = threading.Event(), threading.Barrier(4, timeout=60.0)

  def blocked():
    inside.wait()
    event.wait(120.0)

  threads = [
    threading.Thread(target=blocked, name=f"thread {i}", daemon=True)
    for i in range(3)
  ]
  for thread in threads:
    thread.start()
  inside.wait()
  text = watchdog.stacks(threads[1].ident)
  event.set()
  assert text.startswith("Thread thread 1:\n")
  assert text.count("in blocked") == 3


def test_without_a_launcher_a_stuck_replica_is_only_reported(capsys):
  dog = watching(fixed(0.05), lambda: False, None)
  dog.start()
  printed = []
  read = lambda: printed.append(capsys.readouterr().err) or "".join(printed)
  until(lambda: "Thread MainThread:" in read())
  dog.close()
  assert "replica 7: stuck" in "".join(printed)


def test_a_stuck_step_is_reported_once(capsys):
  looks, stuck = [], threading.Event()

  def awaited():
    looks.append(1)
    if len(looks) > 20:
      stuck.set()
    return False

  dog = watching(fixed(1e-3), awaited, None)
  dog.start()
  assert stuck.wait(60.0)
  dog.close()
  assert capsys.readouterr().err.count("replica 7: stuck") == 1


class _Full:
  """A stream to a full disk."""

  def write(self, text):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

  flush = write


class _Blocked:
  """A stream to a pipe that nobody reads."""

  def __init__(self):
    self.read = threading.Event()

  def write(self, text):
    self.read.wait(120.0)

  flush = str


@pytest.mark.parametrize("kind", [_Full, _Blocked])
def test_a_stuck_replica_is_evicted_even_if_nothing_can_be_printed(
  kind, monkeypatch
):
  stream = kind()
  monkeypatch.setattr(sys, "stderr", stream)
  evicted = threading.Event()
  dog = watching(fixed(0.05), lambda: False, lambda *_: evicted.set())
  dog.start()
  assert evicted.wait(60.0)
  if kind is _Blocked:
    stream.read.set()
  dog.close()


def test_stuck_replica_does_not_block_the_others(tmp_path, capfd):
  path = tmp_path / "run.jsonl"
  released = threading.Event()
  steps = []

  def blocked_data_loader(replica):
    # Other steps have an hour, however slow this machine is.
    for _ in range(240):
      replica._participant.watchdog._steps._since -= 5000.0
      if released.wait(0.5):
        break

  def train(replica):
    ones = np.ones(4, np.float32)
    while replica.global_step < 3:
      replica.step(ones)
    if replica.replica == 0:
      blocked_data_loader(replica)
      replica.step(ones)
    try:
      while replica.global_step < 8:
        replica.step(ones)
      replica.finish()
    finally:
      released.set()
    steps.append(replica.global_step)

  with pytest.raises(
    coordinator.CoordinatorError, match="was evicted by its watchdog: stuck"
  ):
    coordinator.run_embedded(
      train,
      2,
      optax.sgd(0.1),
      np.ones(4, np.float32),
      lower_on_loss=True,
      step_timeout=3600.0,
      journal=path,
    )
  assert steps == [8]
  assert "in blocked_data_loader" in capfd.readouterr().err
  kinds = {r["kind"]: r for r in run_journals.whole(path)}
  assert "in blocked_data_loader" in kinds["stuck"]["stacks"]
  reason = re.match(
    r"stuck: its step has taken (\d+\.\d) s", kinds["stuck"]["reason"]
  )
  assert float(reason[1]) > 3600.0
  assert kinds["lost"]["replica"] == kinds["stuck"]["replica"]
