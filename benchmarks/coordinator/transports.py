"""The coordinator's transport against ZeroMQ and against bare sockets.

  pip install pyzmq
  python benchmarks/coordinator/transports.py --rounds 5

Two processes of this host. Each candidate has a connection of its own, and they
take turns, round by round; a figure is the median over all rounds.

* Round trip: a message goes there and back, microseconds.
* Throughput: 100 MB (25 M float32) until the receiver has added them to an
  array of its own, GB/s. Arrays of shared memory are added where they lie.
* Death: from SIGKILL of the receiver until the sender is told, milliseconds.
"""

import argparse
import contextlib
import os
import pathlib
import secrets
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time

import numpy as np

from optax_dist.coordinator.transport import interface, sockets, tls

_SECRET = b"a secret of a benchmark"
_BYTES = 100_000_000
_SMALL, _LARGE = 64, 60_000


class Ours:
  """The coordinator's transport.

  Args:
    address: of the other side; None on the side that accepts.
    folder: where certificates are, for TLS.
    tcp: whether to connect over TCP.
    lent: whether arrays lie in memory that can be shared.
  """

  def __init__(self, address, folder, tcp=False, encrypted=False, lent=False):
    files = [str(folder / name) for name in ("cert.pem", "key.pem", "ca.pem")]
    self.name = "there" if address else "here"
    self.peer = "here" if address else "there"
    self._transport = sockets.Transport(
      self.name,
      secret=_SECRET,
      bind="127.0.0.1" if tcp else None,
      ports=[0],
      certificates=tls.Certificates(*files) if encrypted else None,
    )
    ways = self._transport.address.split(",")
    self.address = next(w for w in ways if w.startswith("unix:") != tcp)
    self._lent = lent
    self._next = 0
    self._events = []
    if address:
      self._transport.connect(self.peer, address)
    self._into = np.empty(0)

  def ready(self):
    self._wait(interface.PeerUp)

  def _wait(self, kind):
    while True:
      for i, event in enumerate(self._events):
        if isinstance(event, kind):
          return self._events.pop(i)
      self._events += self._transport.poll(30)

  def send(self, payload):
    self._transport.send(self.peer, [payload])

  def receive(self):
    return self._wait(interface.Message).payload

  def array(self):
    if self._lent:
      memory = self._transport.allocate(_BYTES)
      return np.frombuffer(memory, np.float32)
    return np.empty(_BYTES // 4, np.float32)

  def send_array(self, array):
    self._transport.send_array(self.peer, self._next, array.data)
    self._next += 1
    self._wait(interface.ArraySent)

  def add_array(self, total):
    if not self._into.size:
      self._into = np.empty(_BYTES // 4, np.float32)
    into = self._into.data
    self._transport.expect(self.peer, self._next, into, in_place=self._lent)
    got = self._wait(interface.ArrayReceived)
    total += np.frombuffer(got.data, np.float32)
    self._transport.release(self.peer, self._next)
    self._next += 1

  def lost(self):
    self._wait(interface.PeerLost)

  def close(self):
    self._transport.close()


class ZeroMQ:
  """A pair of ZeroMQ's sockets, with CURVE or without."""

  def __init__(self, address, folder, tcp=False, curve=False):
    import zmq

    self._zmq = zmq
    self._context = zmq.Context()
    self._socket = self._context.socket(zmq.PAIR)
    self._socket.linger = 0
    self._socket.rcvtimeo = self._socket.sndtimeo = 30_000
    if curve:
      keys = (folder / "curve").read_bytes().split()
      self._socket.curve_publickey, self._socket.curve_secretkey = keys[:2]
      if address:
        self._socket.curve_serverkey = keys[0]
      else:
        self._socket.curve_server = True
    self._monitor = self._socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    if address:
      self._socket.connect(address)
    elif tcp:
      self._socket.bind("tcp://127.0.0.1:*")
    else:
      self._socket.bind(f"ipc://@optax-dist-{secrets.token_hex(8)}")
    self.address = self._socket.last_endpoint.decode()

  def ready(self):
    pass

  def send(self, payload):
    self._socket.send(payload)

  def receive(self):
    return self._socket.recv()

  def array(self):
    return np.empty(_BYTES // 4, np.float32)

  def send_array(self, array):
    tracker = self._socket.send(array, copy=False, track=True)
    tracker.wait(30)

  def add_array(self, total):
    frame = self._socket.recv(copy=False)
    total += np.frombuffer(frame.buffer, np.float32)

  def lost(self):
    from zmq.utils import monitor

    monitor.recv_monitor_message(self._monitor)

  def close(self):
    self._socket.disable_monitor()
    self._monitor.close()
    self._context.destroy(linger=0)


class Bare:
  """Blocking sockets and nothing else: what Python's loops can reach."""

  def __init__(self, address, folder, tcp=False):
    family = socket.AF_INET if tcp else socket.AF_UNIX
    self._listener = None
    if address:
      self._sock = socket.socket(family)
      host, _, port = address.partition(":")
      self._sock.connect((host, int(port)) if tcp else "\0" + address)
    else:
      self._listener = socket.socket(family)
      name = f"optax-dist-{secrets.token_hex(8)}"
      self._listener.bind(("127.0.0.1", 0) if tcp else "\0" + name)
      self._listener.listen()
      self.address = name
      if tcp:
        self.address = "{}:{}".format(*self._listener.getsockname())
    self._buffer = bytearray(1 << 16)
    self._into = np.zeros(_BYTES // 4, np.float32)

  def ready(self):
    if self._listener:
      self._sock, _ = self._listener.accept()
    if self._sock.family == socket.AF_INET:
      self._sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

  def send(self, payload):
    self._sock.sendall(len(payload).to_bytes(4, "little") + payload)

  def receive(self):
    view, here = memoryview(self._buffer), 0
    while here < 4 or here < 4 + int.from_bytes(view[:4], "little"):
      got = self._sock.recv_into(view[here:])
      if not got:
        raise EOFError
      here += got
    return bytes(view[4:here])

  def array(self):
    return np.empty(_BYTES // 4, np.float32)

  def send_array(self, array):
    self._sock.sendall(array.data.cast("B"))

  def add_array(self, total):
    view = self._into.data.cast("B")
    while view:
      view = view[self._sock.recv_into(view) :]
    total += self._into

  def lost(self):
    with contextlib.suppress(OSError):
      self._sock.recv(1)

  def close(self):
    self._sock.close()
    if self._listener:
      self._listener.close()


CANDIDATES = {
  "AF_UNIX, bare": (Bare, {}),
  "AF_UNIX, ours": (Ours, {}),
  "AF_UNIX, ours, shared memory": (Ours, {"lent": True}),
  "ipc, ZeroMQ": (ZeroMQ, {}),
  "TCP, bare": (Bare, {"tcp": True}),
  "TCP, ours, signed": (Ours, {"tcp": True}),
  "TCP, ours, TLS 1.3": (Ours, {"tcp": True, "encrypted": True}),
  "TCP, ZeroMQ": (ZeroMQ, {"tcp": True}),
  "TCP, ZeroMQ, CURVE": (ZeroMQ, {"tcp": True, "curve": True}),
}


def _make(name, address, folder):
  kind, options = CANDIDATES[name]
  return kind(address, folder, **options)


def _serve(name, address, folder):
  """The other process: answers until it is killed."""
  link = _make(name, address, folder)
  link.ready()
  total = np.zeros(_BYTES // 4, np.float32)
  while True:
    payload = link.receive()
    if payload == b"array":
      link.send(b"go")
      link.add_array(total)
      link.send(b"%d" % total[-1])
    else:
      link.send(payload)


def _measure(link, rounds_of_messages, array):
  result = {}
  for what, size in (("64 B, us", _SMALL), ("60 kB, us", _LARGE)):
    payload = bytes(size)
    count = rounds_of_messages // (1 if size == _SMALL else 4)
    times = []
    for _ in range(count):
      begun = time.perf_counter()
      link.send(payload)
      assert len(link.receive()) == size
      times.append(time.perf_counter() - begun)
    result[what] = statistics.median(times) * 1e6
  link.send(b"array")
  link.receive()
  begun = time.perf_counter()
  link.send_array(array)
  link.receive()
  result["100 MB, GB/s"] = _BYTES / (time.perf_counter() - begun) / 1e9
  return result


def _certificates(folder):
  for command in (
    "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    " -days 2 -subj /CN=job -keyout ca.key -out ca.pem",
    "req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    " -subj /CN=replica -keyout key.pem -out cert.csr",
    "x509 -req -in cert.csr -CA ca.pem -CAkey ca.key -CAcreateserial"
    " -days 2 -out cert.pem",
  ):
    subprocess.run(
      ["openssl", *command.split()], cwd=folder, check=True, capture_output=True
    )


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--rounds", type=int, default=5)
  parser.add_argument("--messages", type=int, default=2000)
  parser.add_argument("--serve", nargs=3, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.serve:
    name, address, folder = args.serve
    _serve(name, address, pathlib.Path(folder))
  with tempfile.TemporaryDirectory() as text:
    _run(args, pathlib.Path(text))


def _run(args, folder):
  _certificates(folder)
  names = list(CANDIDATES)
  try:
    import zmq

    (folder / "curve").write_bytes(b" ".join(zmq.curve_keypair()))
  except ImportError:
    print("pyzmq is not installed: ZeroMQ is left out.")
    names = [n for n in names if "ZeroMQ" not in n]
  rows = {name: {} for name in names}
  for _ in range(args.rounds):
    for name in names:
      link = _make(name, None, folder)
      command = [sys.executable, __file__, "--serve", name, link.address]
      process = subprocess.Popen([*command, str(folder)])
      try:
        link.ready()
        array = link.array()
        array[:] = 1
        # The first one is slower.
        _measure(link, 100, array)
        result = _measure(link, args.messages, array)
        time.sleep(0.05)
        begun = time.perf_counter()
        os.kill(process.pid, signal.SIGKILL)
        link.lost()
        result["death, ms"] = (time.perf_counter() - begun) * 1e3
      finally:
        process.kill()
        process.wait()
        link.close()
      for what, value in result.items():
        rows[name].setdefault(what, []).append(value)
  columns = list(next(iter(rows.values())))
  print("| " + " | ".join(["", *columns]) + " |")
  print("|---" * (len(columns) + 1) + "|")
  for name, result in rows.items():
    cells = [f"{statistics.median(result[what]):.3g}" for what in columns]
    print("| " + " | ".join([name, *cells]) + " |")


if __name__ == "__main__":
  main()
