"""Replicas of several real processes: gloo inside, our transport between them.

`optax_dist.cli.chaos` strikes each process in each phase; here are some.
"""

import group_runs
import pytest

WIDTH = 60
# Of a process: half of w, and b, each padded to 16 elements.
SHARDS = 4 * (80 + 128)


def test_shards_go_to_their_like_and_nowhere_else(tmp_path):
  saved = tmp_path / "saved"
  with group_runs.Groups(tmp_path, width=WIDTH) as groups:
    groups.start(1)
    # One of them writes what all hold.
    groups.job["save"] = [3, str(saved)]
    groups.start(0)
    ended = groups.run()
    assert group_runs.check_equal(ended) >= 2 * 8
    for one in ended:
      (first, before), (last, after) = one.result["before"], one.result["after"]
      steps = last - first
      assert steps == 7
      # 2P(k-1)/k of its own shards, each way, with k = 2.
      assert after["bytes_in"] - before["bytes_in"] == steps * SHARDS
      assert after["bytes_out"] - before["bytes_out"] == steps * SHARDS
  # Of a run of two replicas; one goes on from it.
  job = {"width": WIDTH, "restore": str(saved), "target": 6}
  with group_runs.Groups(tmp_path, replicas=1, **job) as groups:
    groups.start(0)
    resumed = groups.run()
    assert [p.said("begun")[0]["step"] for p in resumed] == [3, 3]
    for one, like in zip(resumed, ended, strict=False):
      assert one.result["prints"]["3"] == like.result["prints"]["3"]


@pytest.mark.parametrize(
  ("replica", "rank", "phase"),
  [(0, 0, "gather"), (1, 1, "reduce_scatter")],
)
def test_a_process_that_dies_takes_its_replica_with_it(
  tmp_path, replica, rank, phase
):
  with group_runs.Groups(tmp_path, target=100_000) as groups:
    fault = {"phase": phase, "time": 3}
    for number in (0, 1):
      groups.start(number, {rank: fault} if number == replica else None)
    victims, others = list(groups.live[replica]), groups.live[1 - replica]
    groups.wait(
      lambda: victims[rank].said("struck") and victims[rank].ended_at,
      "the fault has not struck",
    )
    alone = lambda: any(
      e["members"] == [1 - replica]
      for e in others[0].events
      if e["event"] == "step"
    )
    groups.wait(alone, "the other replica does not go on")
    # It comes back as a whole, and takes part again.
    again = groups.live[replica]
    assert again[0].incarnation == 1
    both = lambda: any(
      e["members"] == [0, 1] for e in again[1].events if e["event"] == "step"
    )
    groups.wait(both, "the replica does not come back")
    groups.finish()
    ended = groups.run()
    assert group_runs.check_equal(ended) > 10
    assert {p.incarnation for p in again} == {1}
