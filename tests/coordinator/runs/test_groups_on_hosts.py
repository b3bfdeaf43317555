"""Two replicas of two processes each, every process on its own host.

Whoever starts a process knows only its own host: what ends is started again there,
and the processes of a replica find each other through the coordinator.
"""

import time

import hosts as host_maker
import pytest

from tests.runs import models
from tests.runs.processes import Processes, prints
from tests.runs.replica import Job


@pytest.mark.nightly  # On one host: test_groups.py.
@pytest.mark.namespaces
def test_replicas_over_two_hosts_outlive_their_processes_and_coordinator(
  tmp_path,
):
  join = {"total_num_replicas": 2, "lower_on_loss": True}
  job = Job(models.sharded, join, pause=0.02, processes=2)
  with (
    host_maker.Hosts(4) as hosts,
    Processes(
      tmp_path / "run",
      job,
      restarts="process",
      hosts=hosts.names,
      coordinator=(hosts.names[0], hosts.address(0)),
    ) as run,
  ):
    first, _ = run.start(0)
    run.start(1)

    def wait_for(*members, more=5):
      began = time.monotonic()
      run.wait(
        lambda: len(first.steps_of(*members, after=began)) >= more,
        f"no steps of {members}",
        240.0,
      )

    lives = lambda replica: [m.incarnation for m in run.of(replica)]
    wait_for(0, 1)
    # Process 1 of replica 1, and then process 0: both begin again, elsewhere.
    for rank in (1, 0):
      before = lives(1)
      run.kill(run.of(1)[rank])
      wait_for(0)
      wait_for(0, 1)
      assert all(now > then for now, then in zip(lives(1), before, strict=True))
      assert len({m.joined["step"] for m in run.of(1)}) == 1
    run.coordinator.kill()
    before = lives(1)
    wait_for(0, 1, more=20)
    assert lives(1) == before  # Nobody has ended with it.
    # A silent process is lost with its replica; once it is heard, both join again.
    hosts.vanish(3)
    wait_for(0)
    run.wait(lambda: lives(1)[0] > before[0], "the other one does not end")
    hosts.heal()
    wait_for(0, 1)
    run.finish()
    assert lives(0) == [0, 0]
    ends = [m.result for replica in (0, 1) for m in run.of(replica)]
    assert [end["error"] for end in ends] == [None] * 4
    assert len({end["step"] for end in ends}) == 1
    shared = [own for own in prints(run.everyone).values() if len(own) > 1]
    assert len(shared) > 30
    assert all(len(set(own)) == 1 for own in shared)
