"""Tests that the driver answers everything that the core has started."""

import contextlib
import dataclasses

import numpy as np
import pytest
from waiting import until as wait_until

from optax_dist.coordinator.aggregation import layout, reducer
from optax_dist.coordinator.protocol import deadlines, entries, inputs, messages
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.runtime import driver, endpoint
from optax_dist.coordinator.runtime.processes import Processes

ROUND = entries.RoundId(0, 3, 1)
WAKE = messages.Save()
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
def world():
  with endpoint.World() as made:
    yield made


@pytest.fixture
def driven(world):
  core = Script()
  one = drive(world.connect("0"), core)
  yield one, core
  one.loop.close("closed")


def drive(place, core):
  template = np.zeros(8, np.float32)
  return driver.Driver(
    core,
    place,
    replica=0,
    reducer=reducer.Reducer(layout.layout([template])),
    initial=[template],
    step=3,
    apply=lambda state, mean: state,
    deadlines=deadlines.of(600.0, 60.0, 60.0),
    silence=deadlines.silence(600.0),
    processes=Processes(),
  )


def collect(peer):
  peers = (entries.Member(1, 1, peer, "unix:gone"),)
  return fx.Aggregate(ROUND, PARTS, peers, (), None)


def until(one, core, kind):
  for _ in range(20):
    for event in one._transport.poll(0):
      one._on_event(event)
    one._run_pending()
    result = [passed for passed in core.seen if isinstance(passed, kind)]
    if result:
      return result
  raise AssertionError(f"no {kind.__name__} in {core.seen}")


def test_disconnecting_fails_all_waits_for_that_peer(driven):
  one, core = driven
  core.does[inputs.Started] = [collect("mute")]
  core.does[type(WAKE)] = [fx.Disconnect("mute", "it is no member")]
  one._inputs.append(inputs.Started())
  one._run_pending()
  assert one.stats()["pending"] == 1
  one._inputs.append(WAKE)
  (failed,) = until(one, core, messages.Failed)
  assert "closed the connection" in failed.reason


def test_an_error_names_the_peer_that_could_not_be_reached(driven):
  one, core = driven
  core.does[type(WAKE)] = [fx.Fail("CoordinatorError", "It waits.")]
  lost = driver.transports.PeerLost("far", "unreachable", "nobody listens")
  one._on_event(lost)
  one._inputs.append(WAKE)
  one._run_pending()
  assert str(one.inbox.failure) == (
    "It waits. Process far could not be reached: nobody listens."
  )


@pytest.mark.parametrize("how", ["broken", "unreachable", "left"])
def test_dead_coordinator_is_restarted(world, how):
  """A coordinator that says goodbye is not restarted: the job is over."""
  started = []
  place = dataclasses.replace(
    world.connect("0"), restart=lambda: started.append(how)
  )
  one = drive(place, Script())
  with contextlib.closing(place.transport):
    lost = driver.transports.PeerLost(endpoint.COORDINATOR, how, "it is gone")
    one._on_event(lost)
    assert until(one, one._core, inputs.PeerLost)
  assert started == ([how] if how != "left" else [])


def test_driver_reports_what_the_core_waits_for(driven):
  one, _ = driven
  assert one.missing() == "Its event loop does not answer."
  one.start()
  # It leaves the event loop a second to answer.
  text = wait_until(lambda: "waits" in (x := one.missing()) and x)
  assert text == "It waits for the end of the script."


def test_passed_deadline_does_not_keep_the_driver_from_polling(driven):
  """The event that ends the core's wait may be among those to poll."""
  one, core = driven
  core.deadline = lambda: 0.0
  one._run_pending()
  assert core.seen == [inputs.TimePassed()]
  assert one.loop.due == 0.0


def test_peers_receive_the_error_that_an_event_loop_raised(driven, world):
  one, core = driven
  peer = world.connect("peer")
  peer.transport.connect(one._transport.name, one._transport.address)
  seen = []

  def comes(kind):
    seen.extend(peer.transport.poll(0.01))
    return [event for event in seen if isinstance(event, kind)]

  def step(given, now):
    if given is WAKE:
      raise ValueError("an array has been donated")
    return []

  core.step = step
  one.start()
  wait_until(lambda: comes(driver.transports.PeerUp))
  one.enqueue(WAKE)
  (lost,) = wait_until(lambda: comes(driver.transports.PeerLost))
  peer.close()
  assert lost.reason == "it has raised ValueError('an array has been donated')"
