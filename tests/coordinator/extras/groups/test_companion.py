"""The other processes of a replica: they find process 0, and do as it says."""

from optax_dist.coordinator.extras.groups import orders
from optax_dist.coordinator.extras.groups.companion import Companion
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol.entries import RoundId

ROUND = RoundId(0, 0, 1)


def begun():
  companion = Companion("a0", "at a0")
  assert companion.step(ins.Started(), 0.0) == [
    fx.Connect("a0", "at a0"),
    fx.Send("a0", orders.Present()),
  ]
  return companion


def test_it_reports_and_applies_what_process_0_says():
  companion = begun()
  for report in (
    ins.Submitted(0, -1, 1, 0, 1, True, b""),
    ins.Aggregated(ROUND),
    ins.SnapshotFetched(3, 9),
  ):
    assert companion.step(report, 1.0) == [fx.Send("a0", report)]
  for order in (fx.UseRun("x"), fx.Apply(ROUND), fx.Restore(9, 3)):
    assert companion.step(ins.Received("a0", order), 1.0) == [order]


def test_it_ends_with_process_0():
  companion = begun()
  (end,) = companion.step(ins.PeerLost("a0", "broken", "killed"), 1.0)
  assert isinstance(end, orders.EndGroup)
  assert "process 0 is lost" in end.reason
  assert companion.over


def test_it_goes_on_if_another_replica_is_lost():
  assert begun().step(ins.PeerLost("b1", "broken", "killed"), 1.0) == []


def test_process_0_may_go_once_the_run_has_ended():
  companion = begun()
  finished = fx.Finished("enough")
  assert companion.step(ins.Received("a0", finished), 1.0) == [finished]
  # What the training loops look at comes even then.
  advance = orders.Advance(1, 2)
  assert companion.step(ins.Received("a0", advance), 1.0) == [advance]
  assert companion.step(ins.PeerLost("a0", "left", "closed"), 2.0) == []


def test_nobody_else_gives_orders():
  (log,) = begun().step(ins.Received("b0", fx.Suspended()), 1.0)
  assert isinstance(log, fx.Log)
