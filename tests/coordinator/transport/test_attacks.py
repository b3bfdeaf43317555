"""Tests that strangers and other jobs are disconnected."""

import contextlib
import dataclasses
import os
import random
import socket
import ssl
import threading
import time

import pytest

from optax_dist.coordinator.transport import interface, sockets
from tests.coordinator.transport import worlds

# Strangers are left soon, and members never within the time of a test.
_QUICK = interface.Limits(
  heartbeat=0.2,
  silence=interface.fixed(200),
  connect=100,
  handshake=0.5,
  max_strangers=16,
)


@pytest.fixture
def attacked(world):
  """Two that are connected and keep on talking, whatever happens."""
  world._limits = _QUICK
  a, b = world.pair()
  yield world, a, b
  world.clear()
  data = os.urandom(300_000)
  a.send("b", [b"still here"])
  a.send_array("b", 1, data)
  b.expect("a", 1, bytearray(len(data)), in_place=True)
  world.wait_for("b", interface.Message)
  (got,) = world.wait_for("b", interface.ArrayReceived)
  assert bytes(got.data) == data
  assert list(a.peers()) == ["b"]
  assert not _strangers(a)


def _strangers(transport):
  """Accepted connections that have not authenticated."""
  return [link for link in transport._connections._links if link.is_stranger]


def _stranger(transport, kind):
  """A connection to the port of a transport."""
  for way in sockets.addresses.parse(transport.address):
    if way.unix and kind == "unix":
      sock = socket.socket(socket.AF_UNIX)
      sock.settimeout(60)
      sock.connect("\0" + way.unix)
      return sock
    if way.host and kind != "unix":
      return socket.create_connection((way.host, way.port), 60)
  raise AssertionError("no such way")


def _is_closed(world, sock):
  """Whether the other side ends the connection."""
  sock.setblocking(False)

  def closed():
    try:
      return sock.recv(4096) == b""
    except BlockingIOError:
      return False
    except OSError:
      return True

  world.run_until(closed)
  sock.close()


_NONSENSE = [
  bytes.fromhex("0400000008011001"),
  bytes.fromhex("000000040000000000"),
  b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("0400000008011001"),
  b"\0" * 100_000,
  b"\xff" * 8,
  # Another part of the handshake, one that is too long, and one without names.
  b"OxDt\x01\x00\x03\x00\x00",
  b"OxDt\x01\x00\x01\xff\xff",
  b"OxDt\x01\x00\x01\x2c\x00" + bytes(40) + b"\xff\xff\xff\xff",
]


@pytest.mark.parametrize("text", _NONSENSE)
def test_malformed_bytes_end_only_their_own_connection(attacked, text):
  world, a, _ = attacked
  sock = _stranger(a, world.kind)
  with contextlib.suppress(OSError):
    sock.sendall(text)
  _is_closed(world, sock)
  assert world.events == {"a": [], "b": []}


def test_random_bytes_end_only_their_own_connections(attacked):
  world, a, b = attacked
  rng = random.Random(7)
  for i in range(100):
    sock = _stranger((a, b)[i % 2], world.kind)
    with contextlib.suppress(OSError):
      sock.sendall(rng.randbytes(rng.choice([1, 8, 9, 100, 5000])))
    world.run(0.002)
    sock.close()
  world.run_until(lambda: not _strangers(a) and not _strangers(b))
  assert world.events == {"a": [], "b": []}


def test_incomplete_handshake_ends_at_its_deadline(attacked):
  world, a, _ = attacked
  silent, half = _stranger(a, world.kind), _stranger(a, world.kind)
  half.sendall(b"OxDt\x01\x00"[: 3 if world.kind != "tls" else 0])
  _is_closed(world, silent)
  _is_closed(world, half)


def test_a_flood_of_connections_keeps_no_member_out(attacked):
  world, a, _ = attacked
  flood = []
  c = world.add("c")
  with contextlib.ExitStack() as stack:
    for i in range(300):
      with contextlib.suppress(OSError):
        flood.append(stack.enter_context(_stranger(a, world.kind)))
      if i == 150:
        world.connect("c", "a")
      world.events["a"] += a.poll(0)
      assert len(_strangers(a)) <= _QUICK.max_strangers
    world.wait_for("c", interface.PeerUp)
  c.disconnect("a")
  world.wait_for("a", interface.PeerLost)
  world.run_until(lambda: not _strangers(a))


def test_peers_of_another_secret_or_run_are_refused(attacked):
  world, _a, _ = attacked
  for options in (
    {"secret": b"another secret of 16"},
    {"run": b"another run"},
    {"secret": worlds.SECRET, "run": b"x"},
  ):
    c = world.add("c", **options)
    c.connect("a", world.address("a"))
    (event,) = world.wait_for("c", interface.PeerLost)
    assert event.how == "refused"
    assert "another secret, or another run" in event.reason
    world.all.pop("c").close()
  assert not world.events["a"]


def test_recorded_connection_cannot_be_replayed(new_world):
  world = new_world("tcp")
  a, b = world.add("a", run=b"run 1"), world.add("b", run=b"run 1")
  proxy = world.proxy(b)
  a.connect("b", proxy.address)
  a.send("b", [b"finish"])
  world.wait_for("b", interface.Message)
  recorded = proxy.there.taken
  assert len(recorded) > 100
  # To the same peer of a later run, of the same run, and with the run's state.
  for run in (b"run 2", b"run 1"):
    later = new_world("tcp")
    target = later.add("b", run=run)
    sock = _stranger(target, "tcp")
    sock.sendall(recorded)
    _is_closed(later, sock)
    assert later.events == {"b": []}
    later.close()


@pytest.mark.parametrize(
  "frame",
  [
    b"\xff\xff\xff\xff\x00" + bytes(8),
    b"\x01\x00\x00\x00\x63" + bytes(9),
    b"\x10\x00\x00\x00\x04" + bytes(24),
    random.Random(1).randbytes(10_000),
  ],
)
def test_member_that_sends_malformed_frames_is_lost(world, frame):
  _a, b = world.pair()
  c = world.add("c")
  world.connect("c", "a")
  world.wait_for("a", interface.PeerUp)
  (link,) = b._connections._links
  link.sock.send(frame)
  world.wait_for("a", interface.PeerLost)
  assert worlds.lost(world, "a") == ["faulty"]
  c.send("a", [b"fine"])
  world.wait_for("a", interface.Message)


def test_man_in_the_middle_cannot_change_messages(new_world):
  # Only one connection leads through, whose handshake may take long.
  limits = dataclasses.replace(_QUICK, handshake=100)
  world = new_world("tcp", limits=limits)
  a, b = world.add("a"), world.add("b")
  listener = socket.create_server(("127.0.0.1", 0))

  def forward(source, target, change):
    total = 0
    with contextlib.suppress(OSError):
      while data := bytearray(source.recv(65536)):
        total += len(data)
        if change and total > 2000:
          data[-1] ^= 1
        target.sendall(data)

  threads = []

  def accept():
    one, _ = listener.accept()
    other = socket.create_connection(("127.0.0.1", b.port))
    for args in ((one, other, True), (other, one, False)):
      threads.append(threading.Thread(target=forward, args=args, daemon=True))
      threads[-1].start()
    socks.extend([one, other])

  socks = [listener]
  thread = threading.Thread(target=accept, daemon=True)
  thread.start()
  a.connect("b", f"127.0.0.1:{listener.getsockname()[1]}")
  world.wait_for("b", interface.PeerUp)
  for _ in range(10):
    a.send("b", [bytes(1000)])
  world.wait_for("b", interface.PeerLost)
  assert worlds.lost(world, "b") == ["faulty"]
  for message in world.of("b", interface.Message):
    assert message.payload == bytes(1000)
  for sock in socks:
    with contextlib.suppress(OSError):
      sock.shutdown(socket.SHUT_RDWR)
    sock.close()
  for thread in threads:
    thread.join(60)


def _ask(context, sock):
  """What the other side answers over TLS, if it does."""
  with contextlib.suppress(OSError), context.wrap_socket(sock) as wrapped:
    wrapped.sendall(b"hello")
    return wrapped.recv(100)
  return b""


def test_certificates_of_another_authority_are_refused(tmp_path, new_world):
  world = new_world("tls", limits=_QUICK)
  a = world.add("a")
  other = new_world("tls", tmp_path, _QUICK)
  b = other.add("b")
  b.connect("a", world.address("a"))
  # Both are driven here, which are of one world but for their certificates.
  world.all["b"], world.events["b"] = b, other.events["b"]
  (event,) = world.wait_for("b", interface.PeerLost)
  assert event.how == "refused"
  assert "its certificate can't be used: it is not signed by" in event.reason
  assert not world.events["a"]
  # And none at all is refused too.
  context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
  sock = _stranger(a, "tls")
  asked = threading.Event()
  thread = threading.Thread(target=lambda: world.run_until(asked.is_set))
  thread.start()
  try:
    assert _ask(context, sock) == b""
  finally:
    asked.set()
    thread.join(60)
    sock.close()


def test_certificates_encrypt_every_byte(new_world):
  world = new_world("tls", limits=_QUICK)
  a, b = world.add("a"), world.add("b")
  proxy = world.proxy(b)
  a.connect("b", proxy.address)
  a.send("b", [b"a message in clear"])
  array = b"an array in clear" * 1000
  a.send_array("b", 1, array)
  world.wait_for("b", interface.Message)
  b.expect("a", 1, bytearray(len(array)), in_place=True)
  world.wait_for("b", interface.ArrayReceived)
  assert len(proxy.there.taken) > len(array)
  assert b"in clear" not in proxy.there.taken
  assert b"OxDt" not in proxy.there.taken


def test_a_process_survives_running_out_of_descriptors(new_world):
  import resource

  world = new_world("tcp", limits=_QUICK)
  a, _b = world.pair()
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  flood = []
  try:
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, hard))
    with contextlib.suppress(OSError):
      for _ in range(50):
        flood.append(_stranger(a, "tcp"))
    begun = time.process_time()
    world.run(1.0)
    a.send("b", [b"x"])
    world.wait_for("b", interface.Message)
  finally:
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    for sock in flood:
      sock.close()
  assert time.process_time() - begun < 30
  world.add("c")
  world.connect("c", "a")
  world.wait_for("a", interface.PeerUp)
