"""Tests that the driver answers everything that the core has started."""

import numpy as np
import pytest
from waiting import until as wait_until

from optax_dist.coordinator.aggregation import layout, reducer
from optax_dist.coordinator.protocol import deadlines, entries, inputs, notes
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.runtime import driver, endpoint, journal_lines
from optax_dist.coordinator.runtime.processes import Processes
from optax_dist.coordinator.store import interface as stores

ATTEMPT = entries.AttemptId(0, 3, 1, 0)
PARTS = (entries.Part(1, 1, 0, 3, 0, 1, 1.0),)


class Script:
  """A core that does what is written down for an input's kind."""

  def __init__(self):
    self.seen, self.does = [], {}

  def step(self, given, now):
    self.seen.append(given)
    return self.does.pop(type(given), [])

  def deadline(self):
    return float("inf")

  def missing(self, now):
    return "for the end of the script"


@pytest.fixture
def driven():
  world = endpoint.World()
  place, core = world.connect("0"), Script()
  template = np.zeros(8, np.float32)
  one = driver.Driver(
    core,
    place,
    replica=0,
    run="",
    gradients=layout.layout([template]),
    reducer=reducer.Reducer(layout.layout([template])),
    initial=[template],
    step=3,
    apply=lambda state, mean, parts: state,
    journal=journal_lines.JournalLines(None, {}),
    deadlines=deadlines.of(600.0, 60.0, 60.0),
    processes=Processes(),
  )
  yield one, core
  one.close()


def collect(peer):
  peers = (entries.Member(1, 1, peer, "unix:gone"),)
  return fx.Aggregate(ATTEMPT, PARTS, peers, (), None)


def until(one, core, kind):
  for _ in range(20):
    for event in one._transport.poll(0):
      one._on_event(event)
    one._proceed()
    found = [given for given in core.seen if isinstance(given, kind)]
    if found:
      return found
  raise AssertionError(f"no {kind.__name__} in {core.seen}")


def test_transfers_with_a_peer_about_to_be_lost_fail_at_once(driven):
  """The transport has lost it already, and would connect to it anew."""
  one, core = driven
  core.does[inputs.Started] = [
    collect("gone"),
    fx.FetchSnapshot(7, "gone", "unix:gone"),
  ]
  one._inputs.append(inputs.Started("n"))
  one._on_event(driver.transports.PeerLost("gone", "broken", "it has died"))
  (failed,) = until(one, core, inputs.AggregateFailed)
  assert failed.failed_replica == 1
  assert until(one, core, inputs.SnapshotFailed)
  assert one.stats()["pending"] == 0


def test_disconnecting_fails_what_waits_for_that_peer(driven):
  one, core = driven
  core.does[inputs.Started] = [collect("mute")]
  core.does[inputs.StoreLost] = [fx.Disconnect("mute", "it is no member")]
  one._inputs.append(inputs.Started("n"))
  one._proceed()
  assert one.stats()["pending"] == 1
  one._inputs.append(inputs.StoreLost("to wake the script"))
  (failed,) = until(one, core, inputs.AggregateFailed)
  assert "closed the connection" in failed.reason


@pytest.mark.parametrize("value", [b"none of ours", b""])
def test_a_value_that_no_replica_wrote_is_the_end_of_the_store(driven, value):
  one, core = driven
  one._requests[1] = "get"
  one._on_store(stores.Value(1, value))
  (lost,) = until(one, core, inputs.StoreLost)
  assert "a value that no replica of this version wrote" in lost.reason


def test_an_error_names_why_the_store_refuses_a_put(driven):
  """A key that has no value is no answer to that."""
  one, core = driven
  core.does[inputs.StoreLost] = [fx.Fail("CoordinatorError", "It waits.")]
  one._requests |= {1: "put", 2: "get"}
  one._on_store(stores.Unknown(1, "the store is full"))
  one._on_store(stores.Value(2, None))
  one._inputs.append(inputs.StoreLost("to wake the script"))
  one._proceed()
  assert str(one.handover.failure) == (
    "It waits. The last request to the store: the store is full."
  )


def test_it_says_what_the_core_waits_for(driven):
  one, _ = driven
  assert one.missing() == "Its event loop does not answer."
  one.start()
  # It leaves the event loop a second to answer.
  told = wait_until(lambda: "waits" in (x := one.missing()) and x)
  assert told == "It waits for the end of the script."


@pytest.mark.parametrize("publishes", [False, True])
def test_a_line_is_written_after_what_others_wait_for(driven, publishes):
  """And before this replica goes on, which may be stopped there, or end."""
  one, core = driven
  order = []

  class Lines:
    def write(self, note):
      order.append("written")

    def close(self):
      order.append("closed")

  one._journal = Lines()
  flush, wake = one._transport.flush, one.handover.wake
  one._transport.flush = lambda: (order.append("sent"), flush())
  one.handover.wake = lambda: (order.append("woken"), wake())
  core.does[inputs.Started] = [
    fx.WriteJournal(notes.Leader(0, 4)),
    fx.Publish(4, False) if publishes else fx.SetAsked(1),
  ]
  one._states.publish = lambda step: order.append("published")
  one._inputs.append(inputs.Started("n"))
  one._proceed()
  published = ["published"] if publishes else []
  assert order == ["sent", "written", *published, "sent", "woken"]


def test_it_knows_whether_arrays_are_sent_or_lent(driven):
  one, core = driven
  core.does[inputs.StoreLost] = [fx.Disconnect("far", "it is no member")]
  up = lambda near: one._on_event(driver.transports.PeerUp("far", near))
  assert not one.is_far_from_some
  up(True)
  assert not one.is_far_from_some
  up(False)
  assert one.is_far_from_some
  one._on_event(driver.transports.PeerLost("far", "broken", "it has died"))
  assert not one.is_far_from_some
  up(False)
  one._inputs.append(inputs.StoreLost("to wake the script"))
  one._proceed()
  assert not one.is_far_from_some


def test_a_deadline_that_has_passed_does_not_keep_it_from_polling(driven):
  """What would end the core's wait is among the events to poll."""
  one, core = driven
  core.deadline = lambda: 0.0
  one._proceed()
  assert core.seen == [inputs.TimePassed()]
  assert one._timeout() == 0.0


def test_peers_learn_what_an_event_loop_has_raised(driven):
  one, core = driven
  peer = endpoint.World().connect("peer")
  peer.transport.connect(one._transport.name, one._transport.address)
  seen = []

  def comes(kind):
    seen.extend(peer.transport.poll(0.01))
    return [event for event in seen if isinstance(event, kind)]

  def step(given, now):
    if isinstance(given, inputs.StoreLost):
      raise ValueError("an array has been donated")
    return []

  core.step = step
  one.start()
  wait_until(lambda: comes(driver.transports.PeerUp), seconds=20.0)
  one.feed(inputs.StoreLost("to wake the script"))
  (lost,) = wait_until(lambda: comes(driver.transports.PeerLost), seconds=20.0)
  peer.close()
  assert lost.reason == "it has raised ValueError('an array has been donated')"
