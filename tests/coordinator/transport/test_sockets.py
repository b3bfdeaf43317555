"""Sockets: liveness, many peers, cuts, other processes."""

import contextlib
import dataclasses
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from optax_dist.coordinator.protocol import liveness
from optax_dist.coordinator.transport import (
  frames,
  interface,
  shared_memory,
  sockets,
)
from tests.coordinator.transport import worlds

# With these, no peer is lost within the time of a test.
_PATIENT = interface.Limits(
  heartbeat=0.1, silence=interface.fixed(200), connect=100, handshake=100
)
# With these, only silent peers are lost; by a virtual clock, which is quicker.
_SILENCE = 60.0
_LOSES = dataclasses.replace(
  _PATIENT, heartbeat=1.0, silence=interface.fixed(_SILENCE)
)
_loses_the_silent = pytest.mark.parametrize(
  ("limits", "clock"), [(_LOSES, worlds.VirtualClock)], ids=[""]
)
_in_virtual_time = pytest.mark.parametrize(
  "clock", [worlds.VirtualClock], ids=[""]
)
# The same while much is sent: the kernel, which goes on while this process is
# stopped, would give up after the longest silence of the limits.
_only_here_loses_the_silent = pytest.mark.parametrize(
  ("limits", "clock"),
  [
    (
      dataclasses.replace(
        _LOSES, silence=liveness.Rule(_SILENCE, _SILENCE, 200.0, 1.0)
      ),
      worlds.VirtualClock,
    )
  ],
  ids=[""],
)


@pytest.fixture
def limits():
  """Limits of all transports of a test, unless it is about silent peers."""
  return _PATIENT


@pytest.fixture
def clock():
  """A factory for the clock of a test; None for the real one."""
  return None


@pytest.fixture
def tcp(new_world, limits, clock):
  """A world over TCP."""
  made = new_world(
    "tcp", limits=limits, clock=clock() if clock else time.monotonic
  )
  yield made
  made.close()


@pytest.fixture
def through_proxy(tcp):
  """Two that are connected through a network that can be cut."""
  a, b = tcp.add("a"), tcp.add("b")
  proxy = tcp.proxy(b)
  a.connect("b", proxy.address)
  tcp.wait_for("a", interface.PeerUp)
  tcp.wait_for("b", interface.PeerUp)
  tcp.clear()
  return tcp, a, b, proxy


def test_broken_connection_is_noticed_at_once(through_proxy):
  world, a, b, proxy = through_proxy
  b.expect("a", 1, bytearray(50_000_000), in_place=True)
  a.send_array("b", 1, bytes(50_000_000))
  world.run_until(lambda: worlds.received(b, "a", 1) > 1_000_000)
  proxy.cut()
  for name in "ab":
    world.wait_for(name, interface.PeerLost)
    failed, lost = world.events[name]
    assert (failed.transfer, failed.sending) == (1, name == "a")
    assert lost.how == "broken"


@_only_here_loses_the_silent
def test_a_network_that_drops_everything_is_noticed(through_proxy):
  world, a, b, proxy = through_proxy
  b.expect("a", 1, bytearray(50_000_000), in_place=True)
  a.send_array("b", 1, bytes(50_000_000))
  world.run_until(lambda: worlds.received(b, "a", 1) > 1_000_000)
  proxy.there.swallows = proxy.back.swallows = True
  begun = world.clock()
  for name in "ab":
    world.wait_for(name, interface.PeerLost)
    assert worlds.lost(world, name) == ["silent"]
  assert world.clock() - begun > 0.7 * _SILENCE


@_loses_the_silent
def test_a_short_outage_is_not_noticed(through_proxy):
  world, a, _b, proxy = through_proxy
  proxy.there.held = proxy.back.held = True
  a.send("b", [b"late"])
  world.run(0.5 * _SILENCE)
  proxy.there.held = proxy.back.held = False
  world.wait_for("b", interface.Message)
  world.run(2 * _SILENCE)
  assert not worlds.lost(world, "a") + worlds.lost(world, "b")


_LEARNS = liveness.Rule(floor=10.0, first=1e4, ceiling=1e4)


@pytest.mark.parametrize(
  ("limits", "clock"),
  [(dataclasses.replace(_LOSES, silence=_LEARNS), worlds.VirtualClock)],
  ids=[""],
)
def test_silence_limit_of_a_peer_is_learned(tcp):
  a, b = tcp.pair()
  (link,) = a._connections._links
  silences = link.memory.silences
  # The peer is silent at first, within its limit.
  tcp.all.pop("b")
  # At the last check, which leaves out how long this process stood still.
  tcp.run_until(lambda: link.memory.quiet > 2 * _SILENCE)
  assert not worlds.lost(tcp, "a")
  tcp.all["b"] = b
  # Heartbeats of b are seen as gaps, of which that was one.
  tcp.run_until(lambda: silences.count >= 2 * _LEARNS.least)
  tcp.run_until(lambda: silences.deadline < 2 * _LEARNS.floor)
  count = silences.count
  tcp.all.pop("b")
  tcp.wait_for("a", interface.PeerLost)
  assert worlds.lost(tcp, "a") == ["silent"]
  # An outage is no usual gap: it does not raise the limit.
  assert silences.count <= count + 1
  assert silences.deadline < 2 * _LEARNS.floor
  b.close()


@_only_here_loses_the_silent
def test_a_slow_transfer_is_not_stuck(through_proxy):
  world, a, b, proxy = through_proxy
  proxy.there.rate = proxy.back.rate = 4_000
  nbytes = 4 * frames.PIECE
  b.expect("a", 1, bytearray(nbytes), in_place=True)
  a.send_array("b", 1, bytes(nbytes))
  begun, idle = world.clock(), []
  sent = 0
  while not world.of("b", interface.ArrayReceived):
    assert not worlds.lost(world, "a") + worlds.lost(world, "b")
    world.run(2.0)
    if came := worlds.received(b, "a", 1):
      idle.append(b.idle("a", 1))
      if came > nbytes // 3 and not sent:
        sent = a.send("b", [b"overtakes"])
    assert world.clock() - begun < 12_000
  assert world.clock() - begun > 3 * _SILENCE
  assert np.median(idle) < _SILENCE / 2
  assert [type(e).__name__ for e in world.events["b"]] == [
    "Message",
    "ArrayReceived",
  ]


@_loses_the_silent
def test_peer_that_stays_silent_after_a_pause_is_lost_in_time(tcp):
  """The pause must not extend the silence limit of the peer."""
  a, b = tcp.pair()
  (link,) = a._connections._links
  b.send("a", [b"before"])
  b.poll(0)
  tcp.clock.advance(5 * _LOSES.heartbeat)
  # Bytes from before the pause are read before the pause is noticed.
  assert [e.payload for e in a.poll(0)] == [b"before"]
  assert link.last_read <= a.now()
  tcp.all.pop("b")
  tcp.wait_for("a", interface.PeerLost)
  assert worlds.lost(tcp, "a") == ["silent"]


@_loses_the_silent
def test_a_process_that_was_stopped_does_not_lose_all_its_peers(tcp):
  a, b = tcp.pair()
  # As after SIGSTOP of both: neither has sent or read for long.
  tcp.clock.advance(3 * _SILENCE)
  tcp.run(0.8 * _SILENCE)
  assert tcp.events == {"a": [], "b": []}
  # Only the peer that stays stopped is lost.
  tcp.all.pop("b")
  until = tcp.clock() + 100 * _SILENCE
  while not (result := a.poll(0)) and tcp.clock() < until:
    tcp.clock.advance(1.5 * _LOSES.heartbeat)  # A busy process.
  assert [e.how for e in result] == ["silent"]
  b.close()


def test_one_event_loop_serves_256_connections(new_world):
  limits = dataclasses.replace(_PATIENT, heartbeat=1.0)
  world = new_world("tcp", limits=limits)
  leader = world.add("leader")
  threads = threading.active_count()
  names = [f"f{i}" for i in range(256)]
  for name in names:
    world.add(name)
    world.connect(name, "leader")
  try:
    world.wait_for("leader", interface.PeerUp, 256)
    assert threading.active_count() <= threads
    for name in names:
      assert leader.send(name, [name.encode()])
    for name in names:
      (got,) = world.wait_for(name, interface.Message)
      assert got.payload == name.encode()
      world.all[name].send("leader", [b"done"])
    world.wait_for("leader", interface.Message, 256)
    assert not worlds.lost(world, "leader")
  finally:
    world.close()


def test_100_reconnects_leave_nothing_behind(world):
  a = world.add("a")

  def files():
    gc.collect()
    return len(os.listdir("/proc/self/fd"))

  for i in range(100):
    if i == 5:
      before = files(), threading.active_count()
    b = world.add("b")
    b.connect("a", world.address("a"))
    world.wait_for("a", interface.PeerUp)
    memory = b.allocate(200_000)
    b.send_array("a", i, memory)
    a.expect("b", i, bytearray(200_000), in_place=True)
    world.wait_for("a", interface.ArrayReceived)
    a.release("b", i)
    if i % 3 == 0:
      a.disconnect("b")
      world.wait_for("b", interface.PeerLost)
    world.all.pop("b").close()
    if i % 3:
      world.wait_for("a", interface.PeerLost)
    world.clear()
    del b, memory
  # Threads and files of other tests may end meanwhile.
  now = lambda: (files(), threading.active_count())
  world.run_until(
    lambda: all(n <= b for n, b in zip(now(), before, strict=True))
  )


@pytest.mark.parametrize("bind", ["::1", "::"])
def test_transport_listens_and_connects_over_ipv6(bind, new_world):
  try:
    socket.create_server(("::1", 0), family=socket.AF_INET6).close()
  except OSError:
    pytest.skip("this host has no IPv6")
  world = new_world("tcp")
  options = {} if bind == "::1" else {"advertise": "::1"}
  world.add("a", bind=bind, **options)
  world.add("b")
  assert worlds.tcp_only(world.all["a"]).startswith("[::1]:")
  world.connect("b", "a")
  world.wait_for("a", interface.PeerUp)
  if bind == "::":
    c = world.add("c")
    c.connect("a", f"127.0.0.1:{world.all['a'].port}")
    world.wait_for("a", interface.PeerUp, 2)


def test_host_names_are_resolved_outside_of_the_event_loop(
  new_world, monkeypatch
):
  real = socket.getaddrinfo

  def look(host, *args, **options):
    if host == "no.such.host.invalid":  # Some name servers take long to say so.
      raise socket.gaierror("Name or service not known")
    return real(host, *args, **options)

  monkeypatch.setattr(socket, "getaddrinfo", look)
  world = new_world("tcp")
  a, b = world.add("a"), world.add("b")
  a.connect("b", f"localhost:{b.port}")
  world.wait_for("a", interface.PeerUp)
  a.connect("c", f"no.such.host.invalid:{b.port}")
  a.disconnect("c")
  # A name with an empty label is looked up nowhere.
  for name, unknown in (("d", "no.such.host.invalid"), ("e", "store..svc")):
    dialer = world.add(name, limits=_PATIENT)
    dialer.connect("c", f"{unknown}:29300")
    worlds.give_up(world, dialer, "c", f"name {unknown!r} can't be")
    (event,) = world.wait_for(name, interface.PeerLost)
    assert event.how == "unreachable"
    assert f"name {unknown!r} can't be resolved" in event.reason


@_in_virtual_time
def test_an_unreachable_address_does_not_hide_the_next_one(tcp):
  tcp.add("a"), tcp.add("b")
  tcp.all["a"]._connections.limits = dataclasses.replace(_PATIENT, handshake=1)
  with socket.socket() as full:
    # It never answers: its queue of one is full.
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    dead = "{}:{}".format(*full.getsockname())
    with socket.create_connection(full.getsockname()):
      ways = f"unix:gone,{dead},127.0.0.1:1,{tcp.address('b')}"
      tcp.all["a"].connect("b", ways)
      tcp.wait_for("a", interface.PeerUp)


def test_without_ipv6_the_ipv4_address_is_tried(tcp, monkeypatch):
  a, b = tcp.add("a"), tcp.add("b")
  result = [
    (socket.AF_INET6, socket.SOCK_STREAM, 6, "", ("::1", b.port, 0, 0)),
    (socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", b.port)),
  ]
  monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: result)
  real = socket.socket.__init__

  def make(sock, family=-1, *args, **options):
    if family == socket.AF_INET6:
      raise OSError(errno.EAFNOSUPPORT, os.strerror(errno.EAFNOSUPPORT))
    real(sock, family, *args, **options)

  monkeypatch.setattr(socket.socket, "__init__", make)
  a.connect("b", f"localhost:{b.port}")
  tcp.wait_for("a", interface.PeerUp)


@pytest.mark.parametrize(
  "way", ["[fe80::1%no-such]:1", f"[fe80::1%{'x' * 99}é]:1", "unix:" + "é" * 95]
)
def test_an_invalid_address_does_not_hide_the_next_one(tcp, way):
  a, _ = tcp.add("a"), tcp.add("b")
  a.connect("b", f"{way},{tcp.address('b')}")
  tcp.wait_for("a", interface.PeerUp)


@_in_virtual_time
def test_connecting_is_retried_without_free_descriptors(tcp, monkeypatch):
  a, b = tcp.add("a"), tcp.add("b")
  attempts = []

  def none_left(*_):
    attempts.append(time.monotonic())
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

  with monkeypatch.context() as patch:
    patch.setattr(socket.socket, "__init__", none_left)
    a.connect("b", f"127.0.0.1:{b.port}")
    tcp.run_until(lambda: len(attempts) > 2)
  tcp.wait_for("a", interface.PeerUp)


def _out_of_watches(*_):
  raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_accepting_is_retried_when_sockets_can_not_be_watched(tcp, monkeypatch):
  a, b = tcp.add("a"), tcp.add("b")
  with monkeypatch.context() as patch:
    patch.setattr(a._connections.poller._selector, "register", _out_of_watches)
    b.connect("a", f"127.0.0.1:{a.port}")
    tcp.run_until(lambda: "closed" in b._connections.dialer.dials["a"].reason)
  tcp.wait_for("a", interface.PeerUp)


@_in_virtual_time
def test_accepting_is_retried_without_free_descriptors(tcp, monkeypatch):
  a, b = tcp.add("a"), tcp.add("b")
  attempts, watches = [], []

  def none_left(*_):
    attempts.append(time.monotonic())
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

  def no_watch(*_):
    watches.append(time.monotonic())
    _out_of_watches()

  with monkeypatch.context() as patch:
    patch.setattr(socket.socket, "accept", none_left)
    b.connect("a", f"127.0.0.1:{a.port}")
    tcp.run_until(lambda: len(attempts) > 1)
    patch.setattr(a._connections.poller._selector, "register", no_watch)
    tcp.run_until(lambda: len(watches) > 1)
  tcp.wait_for("a", interface.PeerUp)


def test_ports_can_be_chosen():
  with socket.create_server(("127.0.0.1", 0)) as taken:
    port = taken.getsockname()[1]
    with pytest.raises(OSError, match=f"Another program .*:{port}"):
      sockets.Transport("a", bind="127.0.0.1", ports=[port])
    made = sockets.Transport("a", bind="127.0.0.1", ports=[port, 0])
    assert made.port not in (None, port)
    made.close()


@pytest.mark.parametrize(
  "told", ["node-1\n", "node 1", "a,b", "node-1:", "node-1:x", "[::1]"]
)
def test_an_invalid_advertised_address_is_refused(told):
  """Other processes, which receive the address, failed on it."""
  with pytest.raises(ValueError, match="advertise must be a host"):
    sockets.Transport(
      "a", bind="127.0.0.1", ports=[0], secret=b"x" * 16, advertise=told
    )


_PEER = """
import os, sys, time
from optax_dist.coordinator.transport import interface, sockets
limits = interface.Limits(
  silence=interface.fixed(200), connect=100, handshake=100
)
t = sockets.Transport("child", limits=limits)
t.connect("a", sys.argv[1])
while not t.peers():
  t.poll(0.1)
memory = t.allocate(1_000_000)
memory[:] = b"7" * len(memory)
t.send_array("a", 1, memory)
t.send("a", [b"ready"])
"""


@contextlib.contextmanager
def _process(a, code):
  code = _PEER + textwrap.dedent(code)
  process = subprocess.Popen([sys.executable, "-c", code, a.address])
  try:
    yield process
  finally:
    process.kill()
    process.wait()


def _until(a, kind, timeout=90.0):
  """Waits for an event of a kind; those that came after it are yet to come."""
  until = time.monotonic() + timeout
  result = []
  while time.monotonic() < until:
    events = a.poll(0.05)
    for i, event in enumerate(events):
      if isinstance(event, kind):
        a._events[:0] = events[i + 1 :]
        return event
    result += events
  raise TimeoutError(f"{result}")


@pytest.fixture
def alone(limits):
  made = sockets.Transport("a", limits=limits)
  yield made
  made.close()


def test_arrays_of_another_process_are_read_in_place(alone):
  with _process(alone, "while True: t.poll(None)"):
    _until(alone, interface.Message)
    alone.expect("child", 1, bytearray(1_000_000), in_place=True)
    event = _until(alone, interface.ArrayReceived)
    assert event.data.readonly
    assert bytes(event.data) == b"7" * 1_000_000
    alone.release("child", 1)


def test_a_killed_process_is_noticed_at_once(alone):
  with _process(alone, "while True: t.poll(None)") as process:
    _until(alone, interface.Message)
    alone.expect("child", 1, bytearray(1_000_000), in_place=True)
    array = _until(alone, interface.ArrayReceived)
    process.kill()
    event = _until(alone, interface.PeerLost)
    assert event.how == "broken"
    assert bytes(array.data) == b"7" * 1_000_000


def test_stopped_process_is_lost_as_silent_and_reconnects(alone):
  code = """
  while True:
    for event in t.poll(None):
      if isinstance(event, interface.PeerLost):
        t.connect("a", sys.argv[1])
        t.send("a", [event.how.encode()])
  """
  with _process(alone, code) as process:
    _until(alone, interface.Message)
    os.kill(process.pid, signal.SIGSTOP)
    (link,) = alone._connections._links
    link.memory.silences.rule = interface.fixed(0.6)
    event = _until(alone, interface.PeerLost)
    assert event.how == "silent"
    link.memory.silences.rule = _PATIENT.silence
    os.kill(process.pid, signal.SIGCONT)
    event = _until(alone, interface.Message)
    assert event.payload == b"broken"


def test_ctrl_c_while_waiting_leaves_connections_as_they_were(tcp, monkeypatch):
  a, b = tcp.pair()
  waits, select = threading.Event(), a._connections.poller._selector.select

  def selecting(timeout):
    waits.set()
    return select(timeout)

  def interrupt():
    assert waits.wait(60.0)
    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

  monkeypatch.setattr(a._connections.poller._selector, "select", selecting)
  thread = threading.Thread(target=interrupt)
  thread.start()
  with pytest.raises(KeyboardInterrupt):
    a.poll(None)
  thread.join()
  data = np.arange(500_000)
  a.send_array("b", 1, data.data)
  b.expect("a", 1, bytearray(data.nbytes), in_place=True)
  (got,) = tcp.wait_for("b", interface.ArrayReceived)
  assert bytes(got.data) == data.tobytes()


def test_arrays_are_sent_to_a_peer_that_can_not_map_memory(alone, monkeypatch):
  def fail(process, file, nbytes, inode):
    raise OSError("not here")

  monkeypatch.setattr(shared_memory, "map_buffer", fail)
  with _process(alone, "while True: t.poll(None)"):
    _until(alone, interface.Message)
    alone.expect("child", 1, bytearray(1_000_000), in_place=True)
    event = _until(alone, interface.ArrayReceived)
    assert not event.data.readonly
    assert bytes(event.data) == b"7" * 1_000_000


def test_small_socket_buffers_suffice(tcp):
  a, b = tcp.pair()
  for transport in (a, b):
    for link in transport._connections._links:
      link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
  data = np.arange(200_000)
  a.send_array("b", 1, data.data)
  b.send_array("a", 1, data.data)
  (
    b.expect("a", 1, bytearray(data.nbytes), in_place=True),
    a.expect("b", 1, bytearray(data.nbytes), in_place=True),
  )
  for i in range(50):
    a.send("b", [bytes([i]) * 3000])
  for name in "ab":
    (got,) = tcp.wait_for(name, interface.ArrayReceived)
    assert bytes(got.data) == data.tobytes()
  got = tcp.wait_for("b", interface.Message, 50)
  assert [m.payload for m in got] == [bytes([i]) * 3000 for i in range(50)]
