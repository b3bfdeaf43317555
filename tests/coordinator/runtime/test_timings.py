"""Tests of the timings that replicas measure, and of their journal fields."""

import math
import threading
import time

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


def test_nonfinite_timings_are_refused():
  """A member's nonsense is counted, like any other."""
  arrive = messages.SubmitGradient(*(0, 0, 0, 1, True), timings=ONE)
  sent = messages.MESSAGES.encode(arrive)
  assert messages.MESSAGES.decode(sent) == arrive
  for bad in (math.nan, math.inf):
    worse = codec.replace(arrive, timings=codec.replace(ONE, waited=bad))
    with pytest.raises(codec.BadMessage):
      messages.MESSAGES.decode(messages.MESSAGES.encode(worse))


@pytest.mark.parametrize(
  ("nbytes", "k"),
  [(64, 2), (64, 1), (64, 4), (400_000, 2)],
  ids=["inline", "backup", "sums", "exchanged"],
)
def test_journal_accounts_for_each_second(tmp_path, nbytes, k):
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
      measured = one["timings"]
      if measured is None:
        # A gradient that went with its replica, or had not come.
        assert record["kind"] == "drop"
        continue
      seen += 1
      assert tuple(measured) == journal.TIMINGS
      assert one["compute"] >= 0.01 * (one["local_step"] >= 0)
      assert one["age"] >= 0
      busy = one["compute"] + measured["encoded"]
      if k <= 2:
        assert busy == pytest.approx(measured["total"], abs=1e-5)
      assert measured["compiled"] <= measured["total"] + 1e-5
      assert (
        measured["exchanged"] + measured["applied"] <= measured["waited"] + 1e-5
      )
      last = before.get(one["replica"])
      if last is not None and last["local_step"] < one["local_step"]:
        assert measured["waited"] > 0
        if nbytes > 4096:
          assert measured["exchanged"] > 0
      before[one["replica"]] = one
  assert seen >= 6


def test_steps_of_an_earlier_coordinator_have_no_details(tmp_path):
  path = str(tmp_path / "run.jsonl")
  lines = journal_lines.JournalLines(path, {"strategy": "s"})
  lines.write(journal_events.Run(journal_events.VERSION, "", 0))
  part = entries.Part(1, 0, 0, 0, 0, 1, 1.0)
  for step, measured in enumerate((None, (None,), (ONE,))):
    commit = entries.Committed(
      entries.RoundId(0, step, 1),
      (part,),
      None,
      False,
      (entries.Details("", 0.5, 0.0),),
      (),
    )
    lines.write(journal_events.committed(commit, measured))
  lines.close()
  result = [
    record["members"][0]["timings"]
    for record in run_journals.whole(tmp_path / "run.jsonl")[1:]
  ]
  assert result[:2] == [None, None]
  assert result[2] == msgspec.structs.asdict(ONE)
