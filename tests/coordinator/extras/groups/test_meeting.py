"""Processes of a replica find each other through a real coordinator."""

import contextlib
import threading

import pytest
from waiting import until

from optax_dist.coordinator import errors
from optax_dist.coordinator.extras.groups import meeting
from optax_dist.coordinator.protocol import deadlines, messages
from optax_dist.coordinator.runtime import endpoint as endpoints
from optax_dist.coordinator.server import process
from optax_dist.coordinator.transport import addresses, interface, sockets

SECRET = b"a secret of enough bytes"
PLACE = "127.0.0.1:1234"


@pytest.fixture
def server(tmp_path):
  (port,) = addresses.free_ports()
  log = tmp_path / "coordinator.log"
  made = [process.start(SECRET, port=port, log=log)]

  def restart():
    made[-1].kill()
    made[-1].stop()
    made.append(process.start(SECRET, port=port, log=log))

  yield made[0].address, restart
  made[-1].stop()


def begin(address, index, losses=None, secret=SECRET):
  silence = deadlines.silence(60.0)
  endpoint = endpoints.connect(address, f"0.{index}", secret, silence)
  call = messages.Meet("", 0, index, 2, "" if index else PLACE)
  on_loss = (lambda reason: None) if losses is None else losses.append
  return meeting.Meeting(endpoint, call, on_loss)


def both_wait(*some):
  result = {}
  threads = [
    threading.Thread(
      target=lambda one=one: result.update({one: one.wait(60.0)})
    )
    for one in some
  ]
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join(90.0)
  return list(result.values())


def both_met(address, losses):
  """Both processes; what the first one loses is added to the losses."""
  first, second = begin(address, 0, losses), begin(address, 1)
  assert both_wait(first, second) == [PLACE, PLACE]
  return first, second


def test_lost_process_ends_the_others_but_joining_does_not(server):
  address, restart = server
  losses = []
  first, second = both_met(address, losses)
  second.close()
  first.close()
  first, second = both_met(address, losses)
  assert not losses
  # The next coordinator watches them, too.
  restart()
  again = begin(address, 1)
  until(lambda: losses, lambda: "nothing is said")
  assert "The replica can't go on: " in losses[0]
  for one in (first, second, again):
    one.close()


def test_a_program_that_ends_without_joining_ends_the_others(server):
  """Its process may live on, since JAX has it wait for the others."""
  address, _ = server
  losses = []
  first, second = both_met(address, losses)
  second._end()
  until(lambda: losses, lambda: "nothing is said")
  why = "its process 1 is lost (ended: it has not joined the run)"
  assert losses == [f"The replica can't go on: {why}."]
  first.close()


def test_waiting_processes_call_the_next_coordinator(server):
  address, restart = server
  first = begin(address, 0)
  until(lambda: first._missing == (1,), first._awaited)
  restart()
  second = begin(address, 1)
  assert both_wait(first, second) == [PLACE, PLACE]
  first.close()
  second.close()


def test_only_the_coordinator_announces_who_is_present(server):
  address, _ = server
  losses = []
  first = begin(address, 0, losses)
  until(lambda: first._missing == (1,), first._awaited)
  transport = first._caller.endpoint.transport
  with contextlib.closing(sockets.Transport("other", secret=SECRET)) as other:
    other.connect(transport.name, transport.address)
    for record in (messages.Met("forged", "10.0.0.9:1"), messages.Parted("x")):
      other.send(transport.name, [messages.MESSAGES.encode(record)])
    got = []
    until(lambda: got.extend(other.poll(0.1)) or got)
    assert isinstance(got[0], interface.PeerUp)
    second = begin(address, 1)
    assert both_wait(first, second) == [PLACE, PLACE]
  first.close()
  second.close()
  assert losses == []


def test_refusal_after_a_connection_is_retried(tmp_path):
  """Its certificate may have expired, and be renewed soon."""
  (port,) = addresses.free_ports()
  log = tmp_path / "coordinator.log"
  losses = []
  with process.start(SECRET, port=port, log=log) as started:
    first = begin(started.address, 0, losses)
    until(lambda: first._missing == (1,), first._awaited)
  with process.start(b"another secret, for a while", port=port, log=log):
    until(lambda: "another secret" in first._awaited(), first._awaited)
  with process.start(SECRET, port=port, log=log) as started:
    second = begin(started.address, 1)
    assert both_wait(first, second) == [PLACE, PLACE]
    first.close()
    second.close()
  assert not losses


def test_error_names_whom_a_process_waits_for(server):
  address, _ = server
  first = begin(address, 0)
  with pytest.raises(errors.CoordinatorError, match="waits for process 1 of"):
    first.wait(1.0)
  stranger = begin(address, 1, secret=b"another secret, long enough")
  with pytest.raises(
    errors.JoinRefused, match="another secret, or another run"
  ):
    stranger.wait(60.0)
  nowhere = begin(f"127.0.0.1:{addresses.free_ports()[0]}", 0)
  with pytest.raises(errors.CoordinatorError, match="optax-dist launch"):
    nowhere.wait(1.0)
