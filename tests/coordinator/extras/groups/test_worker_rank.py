"""The other processes of a replica: they find process 0, and do as it says."""

from optax_dist.coordinator.extras.groups import commands
from optax_dist.coordinator.extras.groups.worker_rank import WorkerRank
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import RoundId

ROUND = RoundId(0, 0, 1)


def test_it_reports_and_applies_what_process_0_says():
  worker_rank = WorkerRank("a0")
  for report in (
    msg.SubmitGradient(0, 1, 0, 1, 1, True),
    msg.Done(ROUND),
    ins.SnapshotFetched(3, 9),
  ):
    assert worker_rank.step(report, 1.0) == [fx.Send("a0", report)]
  for order in (fx.UseRun("x"), fx.Apply(ROUND), fx.Restore(9, 3)):
    assert worker_rank.step(ins.Received("a0", order), 1.0) == [order]


def test_it_ends_with_process_0():
  worker_rank = WorkerRank("a0")
  (end,) = worker_rank.step(ins.PeerLost("a0", "broken", "killed"), 1.0)
  assert isinstance(end, commands.EndGroup)
  assert "process 0 is lost" in end.reason
  assert worker_rank.over


def test_it_goes_on_if_another_replica_is_lost():
  assert (
    WorkerRank("a0").step(ins.PeerLost("b1", "broken", "killed"), 1.0) == []
  )


def test_process_0_may_go_once_the_run_has_ended():
  worker_rank = WorkerRank("a0")
  finished = fx.Finished("enough")
  assert worker_rank.step(ins.Received("a0", finished), 1.0) == [finished]
  # What the training loops look at comes even then.
  advance = commands.Advance(1, 2)
  assert worker_rank.step(ins.Received("a0", advance), 1.0) == [advance]
  assert worker_rank.step(ins.PeerLost("a0", "left", "closed"), 2.0) == []


def test_nobody_else_gives_orders():
  (log,) = WorkerRank("a0").step(ins.Received("b0", fx.Suspended()), 1.0)
  assert isinstance(log, fx.Log)
