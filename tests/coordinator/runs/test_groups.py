"""Replicas of several real processes: gloo inside, our transport between them.

`python -m tests.chaos --processes-per-replica 2` kills each process in each phase.
"""

from tests.chaos import groups as group_runs
from tests.chaos import members
from tests.chaos.members import read_journal

WIDTH = 60
# Of a process: half of w, and b, each padded to 16 elements.
SHARDS = 4 * (80 + 128)


def check_equal(processes, at_least, lost=()):
  """Like holds what like holds, at all steps that both have seen."""
  compared, apart = group_runs.compare([*processes, *lost])
  assert not apart
  assert compared >= at_least
  assert len({p.result["step"] for p in processes}) == 1


def test_shards_travel_between_equal_processes_only(tmp_path):
  saved = tmp_path / "saved"
  with group_runs.Groups(tmp_path, width=WIDTH) as groups:
    groups.start(1)
    # One of them writes what all hold.
    groups.job["save"] = [3, str(saved)]
    groups.start(0)
    ended = groups.run()
    check_equal(ended, at_least=2 * 8)
    for one in ended:
      (first, before), (last, after) = one.result["before"], one.result["after"]
      steps = last - first
      assert steps == 7
      # 2P(k-1)/k of its own shards, each way, with k = 2.
      assert after["bytes_in"] - before["bytes_in"] == steps * SHARDS
      assert after["bytes_out"] - before["bytes_out"] == steps * SHARDS
  # From a run of two replicas; one continues from it.
  job = {"width": WIDTH, "restore": str(saved), "target": 6}
  with group_runs.Groups(tmp_path, replicas=1, **job) as groups:
    groups.start(0)
    resumed = groups.run()
    assert [p.said("joined")[0]["step"] for p in resumed] == [3, 3]
    for one, like in zip(resumed, ended, strict=False):
      assert one.result["prints"][3] == like.result["prints"][3]


def test_a_process_that_dies_takes_its_replica_with_it(tmp_path):
  width = 6_000
  fault = {1: {"phase": "reduce_scatter", "time": 3}}
  job = {"target": 100_000, "width": width, "pause": 0.5}
  with group_runs.Groups(tmp_path, **job) as groups:
    groups.start(0)
    groups.start(1, fault)
    victims, others = list(groups.live[1]), groups.live[0]
    groups.wait(
      lambda: victims[1].said("struck") and victims[1].killed,
      "the fault has not struck",
    )
    groups.wait(
      lambda: others[0].steps_of(0), "the other replica does not go on"
    )
    # It comes back as a whole, and takes part again.
    again = groups.live[1]
    assert {p.incarnation for p in again} == {1}
    groups.wait(
      lambda: len(again[1].steps_of(0, 1)) > 10,
      "the replica does not come back",
    )
    records, _ = read_journal(groups.journal)
    (called,) = [r["step"] for r in records if r["kind"] == "join"][2:]
    for one in again:
      # Parameters and two moments, of its own shards and no others; and the means of
      # the steps for which the other one has not waited.
      mean = 4 * (2 * width + 70)
      own, joined = 3 * mean, one.said("joined")[0]
      means = mean * (1 + joined["step"] - called)
      assert own <= joined["bytes_in"] < 1.2 * own + means
    groups.finish()
    ended = groups.run()
    check_equal(ended, at_least=10, lost=victims)


def test_differing_processes_of_one_rank_are_found():
  def one(rank, **prints):
    made = members.Member(None, 0, rank)
    for step, digest in prints.items():
      made.take({"event": "step", "step": int(step[1:]), "print": digest})
    return made

  pairs = [one(0, s1="a", s2="b"), one(1, s1="x", s2="y")]
  assert group_runs.compare([*pairs, one(0, s2="b", s3="c")]) == (1, [])
  assert group_runs.compare([*pairs, one(1, s2="b")]) == (1, [2])
