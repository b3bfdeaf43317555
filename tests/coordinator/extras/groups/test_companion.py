"""The other processes of a replica: they find process 0, and do as it says."""

import math

import pytest

from optax_dist.coordinator.extras.groups import orders
from optax_dist.coordinator.extras.groups.companion import Companion
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol.entries import AttemptId, Run

ATTEMPT = AttemptId(0, 0, 1, 0)


def begun():
  companion = Companion("a0", "at a0", pause=1.0, patience=10.0)
  (get,) = companion.step(ins.Started("nonce"), 0.0)
  assert get == fx.Get(1, "run")
  return companion


def welcome():
  companion = begun()
  companion.step(ins.GetAnswered(1, True, Run("the run")), 0.0)
  companion.step(ins.Received("a0", orders.Welcomed()), 0.0)
  return companion


def test_it_looks_for_the_run_and_then_for_process_0():
  companion = begun()
  assert companion.step(ins.GetAnswered(1, True, None), 0.0) == []
  assert companion.deadline() == 1.0
  assert companion.step(ins.TimePassed(), 1.0) == [fx.Get(2, "run")]
  found = companion.step(ins.GetAnswered(2, True, Run("the run")), 1.5)
  assert found == [
    fx.UseRun("the run"),
    fx.Connect("a0", "at a0"),
    fx.Send("a0", orders.Present()),
  ]
  # Process 0 does not know of the run yet.
  assert companion.step(ins.PeerLost("a0", "refused", "who?"), 2.0) == []
  (connect, _) = companion.step(ins.TimePassed(), 3.0)
  assert connect == fx.Connect("a0", "at a0")
  companion.step(ins.Received("a0", orders.Welcomed()), 3.5)
  assert companion.deadline() == math.inf


@pytest.mark.parametrize(
  ("run", "what"), [(None, "store"), (Run("x"), "process 0")]
)
def test_it_does_not_look_for_longer_than_it_may(run, what):
  companion = begun()
  if run:
    companion.step(ins.GetAnswered(1, True, run), 0.0)
  assert companion.deadline() <= 10.0
  (*_, fail) = companion.step(ins.TimePassed(), 10.0)
  assert isinstance(fail, fx.Fail)
  assert what in fail.reason


def test_it_reports_and_applies_what_process_0_says():
  companion = welcome()
  for report in (
    ins.Submitted(0, -1, 1, 0, 1, True, b""),
    ins.Aggregated(ATTEMPT),
    ins.SnapshotFetched(3, 9),
  ):
    assert companion.step(report, 1.0) == [fx.Send("a0", report)]
  for order in (fx.Apply(0, ATTEMPT), fx.Restore(9, 3)):
    assert companion.step(ins.Received("a0", order), 1.0) == [order]


def test_it_ends_with_process_0():
  companion = welcome()
  (end,) = companion.step(ins.PeerLost("a0", "broken", "killed"), 1.0)
  assert isinstance(end, orders.EndGroup)
  assert "process 0 is lost" in end.reason
  assert companion.over


def test_it_goes_on_if_another_replica_is_lost():
  assert welcome().step(ins.PeerLost("b1", "broken", "killed"), 1.0) == []


def test_process_0_may_go_once_the_run_has_ended():
  companion = welcome()
  finished = fx.Finished(3, "enough")
  assert companion.step(ins.Received("a0", finished), 1.0) == [finished]
  # What the training loops look at comes even then.
  advance = orders.Advance(1, 2)
  assert companion.step(ins.Received("a0", advance), 1.0) == [advance]
  assert companion.step(ins.PeerLost("a0", "left", "closed"), 2.0) == []


def test_nobody_else_gives_orders():
  (log,) = welcome().step(ins.Received("b0", fx.Suspended()), 1.0)
  assert isinstance(log, fx.Log)
