"""Replicas of several real processes: gloo inside, our transport between them.

`python -m tests.chaos --processes-per-replica 2` kills each process in each phase.
"""

import dataclasses
import functools

from tests.runs import models
from tests.runs.processes import Member, Processes, prints
from tests.runs.replica import Job

WIDTH = 60
# Of a process: half of w, and b, each padded to 16 elements.
SHARDS = 4 * (80 + 128)


def _processes(folder, width=WIDTH, replicas=2, restarts="", **job):
  join = {
    "total_num_replicas": replicas,
    "lower_on_loss": True,
    # Kills are detected immediately; a busy machine is not a fault.
    "timeout": 100.0,
    "transfer_timeout": 10.0,
    "silence_timeout": 10.0,
  }
  model = functools.partial(models.sharded, width)
  job = Job(model, join, processes=2, **job)
  return Processes(folder / "run", job, restarts=restarts)


def differing(members):
  """At which steps processes differ that hold the same; and how many are alike."""
  shared = {at: own for at, own in prints(members).items() if len(own) > 1}
  apart = {step for (_, step), own in shared.items() if len(set(own)) > 1}
  return len(shared), sorted(apart)


def check_equal(run, at_least):
  """Like holds what like holds, at all steps that both have seen."""
  compared, apart = differing(run.everyone)
  assert not apart
  assert compared >= at_least
  assert len({m.result["step"] for m in run.everyone if m.result}) == 1


def test_shards_travel_between_equal_processes_only(tmp_path):
  saved = tmp_path / "saved"
  with _processes(tmp_path, target=8) as run:
    run.may_end = True
    run.start(1)
    # One of them writes what all hold.
    job = dataclasses.replace(run.job, checkpoints=str(saved), every=3)
    run.job = job
    run.start(0)
    run.wait(lambda: not run.live, "not all come to the end")
    check_equal(run, at_least=2 * 8)
    for one in run.everyone:
      (first, before), (last, after) = one.result["before"], one.result["after"]
      steps = last - first
      assert steps == 7
      # 2P(k-1)/k of its own shards, each way, with k = 2.
      assert after["bytes_in"] - before["bytes_in"] == steps * SHARDS
      assert after["bytes_out"] - before["bytes_out"] == steps * SHARDS
    ended = run.of(0)
  # From a run of two replicas; one continues from it.
  job = {"target": 8, "checkpoints": str(saved)}
  with _processes(tmp_path, replicas=1, **job) as run:
    run.may_end = True
    run.start(0)
    run.wait(lambda: not run.live, "not all come to the end")
    assert [m.joined["step"] for m in run.of(0)] == [6, 6]
    for one, like in zip(run.of(0), ended, strict=True):
      assert one.result["prints"][6] == like.result["prints"][6]


def test_a_process_that_dies_takes_its_replica_with_it(tmp_path):
  width = 6_000
  with _processes(tmp_path, width, restarts="replica", pause=0.5) as run:
    run.start(0)
    run.start(1)
    others = run.of(0)
    together = lambda: len(others[0].steps_of(0, 1)) > 2
    run.wait(together, "they do not begin")
    run.arm("reduce_scatter", process=(1, 1))
    run.wait(lambda: run.entered, "the fault has not struck")
    run.kill(run.entered)
    run.wait(lambda: others[0].steps_of(0), "the other replica does not go on")
    # It comes back as a whole, and takes part again.
    run.wait(
      lambda: len(run.of(1)[1].steps_of(0, 1)) > 10,
      "the replica does not come back",
    )
    assert {m.incarnation for m in run.of(1)} == {1}
    records, _ = run.records()
    (called,) = [r["step"] for r in records if r["kind"] == "join"][2:]
    for one in run.of(1):
      # Parameters and two moments, of its own shards and no others; and the means of
      # the steps for which the other one has not waited.
      mean = 4 * (2 * width + 70)
      own = 3 * mean
      means = mean * (1 + one.joined["step"] - called)
      assert own <= one.joined["bytes_in"] < 1.2 * own + means
    run.finish()
    check_equal(run, at_least=10)


def test_differing_processes_of_one_rank_are_found():
  def one(rank, **digests):
    said = [
      {"step": int(step[1:]), "print": digest}
      for step, digest in digests.items()
    ]
    return Member(None, 0, rank, steps=said)

  pairs = [one(0, s1="a", s2="b"), one(1, s1="x", s2="y")]
  assert differing([*pairs, one(0, s2="b", s3="c")]) == (1, [])
  assert differing([*pairs, one(1, s2="b")]) == (1, [2])
