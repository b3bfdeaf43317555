"""Sockets as the event loop sees them: what a call returns, and what it keeps."""

import contextlib
import socket
import ssl

import numpy as np
import pytest

from optax_dist.coordinator.transport import channels
from tests.coordinator.transport import worlds

_LARGE = np.random.default_rng(0).integers(0, 256, 300_000, np.uint8).tobytes()


@pytest.fixture
def opened():
  """Connects two channels by a pair of sockets of this host, and closes them."""
  with contextlib.ExitStack() as stack:

    def pair(tls=None):
      socks = socket.socketpair()
      for sock in socks:
        sock.setblocking(False)
      made = [
        channels.open_channel(sock, tls, server_side, 5.0)
        for sock, server_side in zip(socks, (True, False), strict=True)
      ]
      for channel in made:
        stack.callback(channel.sock.close)
      return made

    yield pair


@pytest.fixture
def tls(certificate_folder):
  return worlds.certificates(certificate_folder).contexts()


def _read(channel, nbytes=1 << 16):
  """What is there, up to so many bytes; None if nothing is."""
  room = bytearray(nbytes)
  got = channel.receive([memoryview(room)])
  return None if got is None else bytes(room[:got])


def _send_all(one, other, output):
  """Writes all; returns what the other side has read meanwhile."""
  parts, result = [memoryview(part) for part in output], b""
  while parts:
    sent = one.send(parts) or 0
    while parts and sent >= len(parts[0]):
      sent -= len(parts.pop(0))
    if parts:
      parts[0] = parts[0][sent:]
    while more := _read(other):
      result += more
  return result


def _meet(server, client):
  """Both sides of TLS shake hands, which takes their first bytes."""
  for _ in range(3):
    for channel in (client, server):
      assert _read(channel) is None


def test_nothing_to_read_is_not_the_end(opened):
  one, other = opened()
  assert _read(one) is None
  other.sock.close()
  assert _read(one) == b""


def test_reads_fill_one_buffer_after_the_other(opened):
  one, other = opened()
  one.send([b"abc", b"defgh"])
  first, second = bytearray(5), bytearray(5)
  room = [memoryview(first), memoryview(second)]
  assert other.receive(room) == 8
  assert (first, second[:3]) == (b"abcde", b"fgh")


@pytest.mark.parametrize("parts", [1, 3])
def test_a_full_socket_takes_a_part_and_then_nothing(opened, parts):
  one, other = opened()
  output = [_LARGE[:9], _LARGE[9:50_000], _LARGE[50_000:]]
  output = [_LARGE] if parts == 1 else output
  sent = 0
  while (more := one.send(output)) is not None:
    sent += more
    assert 0 < more <= len(_LARGE)
  read = 0
  while result := _read(other):
    read += len(result)
  assert read == sent
  assert one.send(output)  # There is room again.


@pytest.mark.parametrize("kind", ["plain", "tls"])
def test_a_short_read_is_the_last_one_if_it_says_so(opened, kind, request):
  server, client = opened(
    request.getfixturevalue("tls") if kind == "tls" else None
  )
  if kind == "tls":
    _meet(server, client)
  sent = 0
  while sent < 20_000:
    sent += client.send([_LARGE[sent:20_000]])
  room = 40_000
  first = _read(server, room)
  rest = _read(server, room)
  if server.drains:
    assert rest is None
  # A record of TLS is a read of its own.
  assert first + (rest or b"") == _LARGE[:20_000]
  assert (rest is not None) == (kind == "tls")


def test_tls_reports_what_each_side_waits_for(opened, tls):
  """The event loop would wait for the wrong one, and so without end."""
  server, client = opened(tls)
  # A server can write nothing before it has read the other's first bytes.
  assert server.send([b"early"]) is None
  assert server.writes_when_readable
  for _ in range(2):
    assert _read(client) is None
    sent = server.send([b"early"])
  assert sent == 5
  assert not server.writes_when_readable
  assert _read(client) == b"early"
  # Once the socket is full, it waits for room.
  while server.send([_LARGE]) is not None:
    pass
  assert not server.writes_when_readable
  assert not server.reads_when_writable


def test_tls_carries_buffers_in_order(opened, tls):
  server, client = opened(tls)
  _meet(server, client)
  output = [_LARGE[:13], _LARGE[13:20_000], b"", _LARGE[20_000:]]
  assert _send_all(client, server, output) == _LARGE
  # A small header goes with what comes after it, in one record.
  assert client.send([_LARGE[:13], _LARGE[13:]]) > 13
  while _read(server):
    pass
  assert _send_all(server, client, output[:2]) == _LARGE[:20_000]


def test_the_end_of_tls_is_the_end_with_or_without_a_goodbye(opened, tls):
  server, client = opened(tls)
  _meet(server, client)
  client.sock.close()
  assert _read(server) == b""
  server, client = opened(tls)
  _meet(server, client)
  with pytest.raises(ssl.SSLWantReadError):
    client.sock.unwrap()
  assert _read(server) == b""


def test_a_process_without_a_certificate_is_refused(opened, tls):
  bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
  bare.check_hostname, bare.verify_mode = False, ssl.CERT_NONE
  server, client = opened((tls[0], bare))

  def talk():
    for _ in range(4):
      _read(client)
      assert _read(server) is None

  with pytest.raises(ssl.SSLError, match="CERTIFICATE"):
    talk()


def test_the_kernel_gives_up_after_the_same_silence():
  """Of bytes that nobody acknowledges; and small messages go at once."""
  with socket.create_server(("127.0.0.1", 0)) as listener:
    sock = socket.create_connection(listener.getsockname(), 60.0)
    with sock, listener.accept()[0]:
      channel = channels.open_channel(sock, None, False, 2.5)
      option = lambda kind: channel.sock.getsockopt(socket.IPPROTO_TCP, kind)
      assert option(socket.TCP_USER_TIMEOUT) == 2500  # Milliseconds.
      assert option(socket.TCP_NODELAY)
