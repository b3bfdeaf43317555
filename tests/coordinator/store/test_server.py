"""A store process among strangers, members that flood it, and bad requests."""

import contextlib
import dataclasses
import socket
import threading
import time

import pytest
import served
import waiting

from optax_dist.coordinator.store import interface, wire
from optax_dist.coordinator.transport import interface as transports
from optax_dist.coordinator.transport import sockets


@pytest.fixture
def store():
  made = served.Served(100_000)
  yield made
  made.close()


def works(owner, key="works"):
  """Whether the store still does what it is for."""
  number = owner.begin("put", key, b"x")
  return owner.answer(number) == interface.Done(number)


@pytest.mark.parametrize("secret", [b"another secret!!", b""])
def test_another_secret_can_neither_read_nor_write(store, secret):
  member, stranger = store.owner(), store.owner(secret=secret)
  assert works(member)
  for ask in (
    lambda: stranger.begin("get", "works"),
    lambda: stranger.begin("put", "works", b"forged"),
    lambda: stranger.begin("delete", ["works"]),
  ):
    ask()
  assert "another secret, or another run" in stranger.lost()
  assert store.address in stranger.lost()
  assert not [
    e for e in stranger.events if not isinstance(e, interface.StoreLost)
  ]
  assert member.get("works") == b"x"
  assert store.server.clients == 1


@pytest.mark.parametrize(
  "junk",
  [
    b"",
    b"\x04\x00\x00\x00\x08\x01\x10\x01",
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(100_000),
    b"\xff" * 7,
  ],
)
def test_messages_of_strangers_have_no_effect(store, junk):
  member = store.owner()
  host, _, port = store.address.rpartition(":")
  strangers = [
    socket.create_connection((host, int(port)), 60.0) for _ in range(20)
  ]
  for one in strangers:
    with contextlib.suppress(OSError):  # It is not listened to any more.
      one.sendall(junk)
  assert works(member)
  for one in strangers:
    one.close()


def test_a_flood_of_strangers_keeps_nobody_out(store):
  host, _, port = store.address.rpartition(":")
  flooding = threading.Event()
  flooding.set()
  made = []

  def flood():
    while flooding.is_set() and len(made) < 800:
      try:
        made.append(socket.create_connection((host, int(port)), 1.0))
      except OSError:
        time.sleep(0.01)

  thread = threading.Thread(target=flood)
  thread.start()
  try:
    time.sleep(0.2)
    member = store.owner()
    assert all(works(member, f"log/{key}") for key in range(20))
  finally:
    flooding.clear()
    thread.join()
    for one in made:
      one.close()


def test_only_the_member_that_floods_the_store_is_refused(store):
  flood, leader = store.owner(), store.owner()
  answers = [
    flood.ask("put_if_absent", f"log/{key}", b"x") for key in range(60)
  ]
  kinds = [type(a).__name__ for a in answers]
  assert kinds == ["Done"] * 48 + ["Unknown"] * 12
  assert "at most 100,000" in answers[-1].reason
  assert "client0" in answers[-1].reason
  assert works(leader)
  large = flood.ask("put", "log/0", bytes(60_000))
  assert isinstance(large, interface.Unknown)
  # What it has removes itself, and then there is room.
  assert isinstance(flood.ask("delete", ["log/0", "log/1"]), interface.Done)
  assert works(flood)


class _Rude:
  """A member of the job that speaks as no client does."""

  def __init__(self, store):
    self.transport = sockets.Transport(
      "rude", secret=served.SECRET, limits=served.PATIENT
    )
    self.transport.connect(wire.STORE, store.address)
    self.events = []

  def send(self, payload):
    self.transport.send(wire.STORE, [payload])

  def wait_for(self, kind):
    end = time.monotonic() + 60.0
    while time.monotonic() < end:
      self.events += self.transport.poll(0.1)
      found = [e for e in self.events if isinstance(e, kind)]
      if found:
        return found[0]
    raise AssertionError(f"no {kind} in {self.events}")


@pytest.mark.parametrize(
  "payload",
  [
    b"nonsense",
    b"",
    wire.REPLIES.encode(interface.Done(1)),
    wire.REQUESTS.encode(interface.Get(1, "")),
    wire.REQUESTS.encode(interface.Put(1, "log//", b"x")),
    wire.REQUESTS.encode(interface.Put(1, "a", bytes(interface.MAX_VALUE + 1))),
    wire.REQUESTS.encode(interface.Delete(1, ("a",) * 200)),
  ],
)
def test_a_member_that_sends_nonsense_is_disconnected(store, payload):
  member, rude = store.owner(), _Rude(store)
  rude.send(payload)
  told = rude.wait_for(transports.PeerLost)
  assert told.how == "left", told
  assert "it sent an invalid request" in told.reason
  assert store.server.refused == 1
  assert works(member)
  rude.transport.close()


def test_a_client_that_does_not_read_does_not_block_the_others():
  store = served.Served(
    limits=dataclasses.replace(served.PATIENT, max_queued=1 << 20)
  )
  try:
    deaf, member = _Rude(store), store.owner()
    member.ask("put", "log/0", bytes(500_000))
    deaf.wait_for(transports.Message)
    for number in range(60):
      deaf.send(wire.REQUESTS.encode(interface.Get(number, "log/0")))
    deaf.transport.flush()
    assert works(member)
    waiting.until(lambda: store.server.clients == 1)
    deaf.transport.close()
  finally:
    store.close()
