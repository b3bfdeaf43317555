"""Tests of the timings that replicas measure, and of their journal fields."""

import math
import threading
import time

import jax
import msgspec
import numpy as np
import optax
import pytest
import run_journals

from optax_dist import coordinator
from optax_dist.coordinator import journal
from optax_dist.coordinator.protocol import (
  codec,
  entries,
  journal_events,
  messages,
)
from optax_dist.coordinator.runtime import timings
from optax_dist.coordinator.server import journal_lines

ONE = timings.Timings(1.0, 0.25, 0.5, 0.125, 0.5, 0.25, 0.125)


def test_timings_that_are_no_numbers_are_refused():
  """A member's nonsense is counted, like any other."""
  arrive = messages.SubmitGradient(*(0, 0, 0, 1, 1, True), timings=ONE)
  sent = messages.MESSAGES.encode(arrive)
  assert messages.MESSAGES.decode(sent) == arrive
  for bad in (math.nan, math.inf):
    worse = codec.replace(arrive, timings=codec.replace(ONE, waited=bad))
    with pytest.raises(codec.BadMessage):
      messages.MESSAGES.decode(messages.MESSAGES.encode(worse))


def test_compiling_counts_in_the_thread_that_does_it():
  before = timings.compiled()
  jax.jit(lambda x: x * 3.5 + 1)(np.ones(3)).block_until_ready()
  mine = timings.compiled() - before
  assert mine > 0
  theirs = []
  thread = threading.Thread(target=lambda: theirs.append(timings.compiled()))
  thread.start()
  thread.join()
  assert theirs == [0.0]
  assert timings.compiled() - before == mine


@pytest.mark.parametrize(
  ("nbytes", "k"),
  [(64, 2), (64, 1), (64, 4), (400_000, 2)],
  ids=["inline", "backup", "sums", "exchanged"],
)
def test_the_journal_has_where_each_second_went(tmp_path, nbytes, k):
  """start, computing, encoding and waiting follow each other without a gap."""
  zeros = np.zeros(nbytes // 4, np.float32)
  # Or one could make all steps before the other is in.
  together = threading.Barrier(2, timeout=60.0)

  def train(replica):
    together.wait()
    while replica.global_step < 6 and not replica.finished:
      time.sleep(0.01)
      replica.step(zeros)
    if not replica.finished:
      replica.finish()

  coordinator.run_embedded(
    train,
    2,
    optax.sgd(0.1),
    zeros,
    replicas_to_aggregate=k,
    journal=tmp_path / "run.jsonl",
    timeout=60.0,
  )
  records = run_journals.whole(tmp_path / "run.jsonl")
  assert records[0]["gradient_bytes"] >= nbytes
  before = {}
  seen = 0
  for record in records:
    members = record["members"] if record["kind"] == "commit" else ()
    for one in (record,) if record["kind"] == "drop" else members:
      told = one["timings"]
      if told is None:
        # A gradient that went with its replica, or had not come.
        assert record["kind"] == "drop"
        continue
      seen += 1
      assert tuple(told) == journal.TIMINGS
      assert one["compute"] >= 0.01 * (one["local_step"] >= 0)
      assert one["age"] >= 0
      busy = one["compute"] + told["encoded"]
      if k <= 2:
        assert busy == pytest.approx(told["total"], abs=1e-5)
      assert told["compiled"] <= told["total"] + 1e-5
      assert told["exchanged"] + told["applied"] <= told["waited"] + 1e-5
      last = before.get(one["replica"])
      if last is not None and last["local_step"] < one["local_step"]:
        assert told["waited"] > 0
        if nbytes > 4096:
          assert told["exchanged"] > 0
      before[one["replica"]] = one
  assert seen >= 6


def test_steps_of_an_earlier_coordinator_have_no_details(tmp_path):
  lines = journal_lines.JournalLines(tmp_path / "run.jsonl", {"strategy": "s"})
  lines.open([])
  lines.write(journal_events.Run(journal_events.VERSION, "", 0))
  part = entries.Part(1, 0, 0, 0, 0, 1, 1.0)
  for step, told in enumerate((None, (None,), (ONE,))):
    commit = entries.Committed(
      entries.RoundId(0, step, 1),
      (part,),
      None,
      False,
      (entries.Details("", 0.5, 0.0),),
      (),
    )
    lines.write(journal_events.committed(commit, told))
  lines.close()
  result = [
    record["members"][0]["timings"]
    for record in run_journals.whole(tmp_path / "run.jsonl")[1:]
  ]
  assert result[:2] == [None, None]
  assert result[2] == msgspec.structs.asdict(ONE)


class _Clock:
  """Stands still but for what a test lets pass."""

  now = 100.0

  def __call__(self):
    return self.now


@pytest.fixture
def clock(monkeypatch):
  clock = _Clock()
  monkeypatch.setattr(timings.time, "monotonic", clock)
  return clock


def test_times_after_a_submission_are_sent_with_the_next_one(clock):
  watch = timings.Stopwatch()
  clock.now = 101.0
  watch.computed()
  assert watch.take() == 1.0
  clock.now = 101.25
  first = watch.submitted(0.0, 0.0, (10, 20))
  assert (first.total, first.encoded) == (1.25, 0.25)
  assert (first.waited, first.bytes_in, first.bytes_out) == (0.0, 10, 20)
  clock.now = 101.75
  watch.begin(first=True)
  clock.now = 103.75
  watch.computed()
  # No part of a wait is longer than the wait.
  second = watch.submitted(0.125, 7.0, (11, 22))
  assert (second.total, second.waited, second.applied) == (2.0, 0.5, 0.5)
  assert (second.exchanged, second.bytes_in, second.bytes_out) == (0.125, 1, 2)


def test_a_sum_starts_with_its_first_gradient(clock):
  watch = timings.Stopwatch()
  for clock.now in (101.0, 103.0):
    watch.computed()
    watch.begin(first=False)
  assert watch.take() == 3.0
  assert watch.take() == 0.0
  assert watch.submitted(0.0, 0.0, (0, 0)).total == 3.0
