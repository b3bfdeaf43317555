"""Replicas of several real processes: gloo inside, our transport between them.

`python -m tests.chaos --processes-per-replica 2` kills each process in each phase.
"""

import functools

from optax_dist.coordinator import checkpoint
from tests.runs import models
from tests.runs.processes import Member, Processes, prints
from tests.runs.replica import Job

WIDTH = 6_000
# Bytes of a process: half of w, and b, and what aligns them.
SHARDS = 4 * (2 * WIDTH + 80)


def _processes(folder, replicas=2, restarts="", **job):
  join = {
    "total_num_replicas": replicas,
    "lower_on_loss": True,
    # Kills are detected immediately; a busy machine is not a fault.
    "timeout": 100.0,
    "transfer_timeout": 10.0,
    "silence_timeout": 10.0,
  }
  model = functools.partial(models.sharded, WIDTH)
  saved = str(folder / "saved")
  job = Job(model, join, checkpoints=saved, processes=2, **job)
  return Processes(folder / "run", job, restarts=restarts)


def differing(members):
  """At which steps processes differ that hold the same; and how many are alike."""
  shared = {at: own for at, own in prints(members).items() if len(own) > 1}
  apart = {step for (_, step), own in shared.items() if len(set(own)) > 1}
  return len(shared), sorted(apart)


def check_equal(members, at_least):
  """Processes of equal rank hold the same, at all steps that both have seen."""
  compared, apart = differing(members)
  assert not apart
  assert compared >= at_least


def test_a_process_that_dies_takes_its_replica_with_it(tmp_path):
  with _processes(tmp_path, restarts="replica", pause=0.5) as run:
    run.start(0)
    run.start(1)
    first = run.of(0)[0]
    run.wait(lambda: len(first.steps_of(0, 1)) > 5, "they do not begin")
    for one in run.everyone:
      both = one.steps_of(0, 1)
      steps = both[-1]["step"] - both[1]["step"]
      for way in ("bytes_in", "bytes_out"):
        # 2P(k-1)/k of its own shards, each way, with k = 2.
        assert both[-1][way] - both[1][way] == steps * SHARDS
    run.arm("reduce_scatter", process=(1, 1))
    run.wait(lambda: run.entered, "the fault has not struck")
    run.kill(run.entered)
    run.wait(lambda: first.steps_of(0), "the other replica does not go on")
    # It comes back as a whole, and takes part again.
    run.wait(
      lambda: len(run.of(1)[1].steps_of(0, 1)) > 5,
      "the replica does not come back",
    )
    assert {m.incarnation for m in run.of(1)} == {1}
    records, _ = run.records()
    (called,) = [r["step"] for r in records if r["kind"] == "join"][2:]
    for one in run.of(1):
      # Parameters and two moments, of its own shards and no others; and the means of
      # the steps for which the other one has not waited, of which one is on its way.
      mean = 4 * (2 * WIDTH + 70)
      by_then = [e["step"] for e in first.steps if e["at"] < one.joined["at"]]
      means = mean * (2 + max(by_then) - called)
      assert 3 * mean <= one.joined["bytes_in"] < 3.6 * mean + means
    run.finish()
    check_equal(run.everyone, at_least=10)
    before = [m for m in run.everyone if m.joined]
  saved = checkpoint.latest(tmp_path / "saved")
  # From a run of two replicas; one continues from it.
  with _processes(tmp_path, replicas=1) as run:
    run.start(0)
    run.wait(lambda: all(m.steps for m in run.everyone), "it does not go on")
    (began,) = {m.joined["step"] for m in run.everyone}
    assert saved.name == f"step-{began:08}"
    run.finish()
  # What the earlier run did after what it had saved is another history.
  for one in before:
    one.steps = [e for e in one.steps if e["step"] <= began]
  check_equal([*before, *run.everyone], at_least=10)
  resumed = prints(run.everyone)
  for (rank, step), digests in prints(before).items():
    if step == began:
      assert resumed[rank, step] == [digests[0]]


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
