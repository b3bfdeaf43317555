"""Sockets as the event loop sees them: what a call returns, and what it keeps."""

import socket

import pytest

from optax_dist.coordinator.transport import channels


@pytest.mark.parametrize(
  ("seconds", "told"), [(2.5, 2500), (1e9, (1 << 31) - 1)]
)
def test_kernel_timeout_equals_the_silence_timeout(seconds, told):
  """It is for bytes without acknowledgement; and small messages go at once."""
  with socket.create_server(("127.0.0.1", 0)) as listener:
    sock = socket.create_connection(listener.getsockname(), 60.0)
    with sock, listener.accept()[0]:
      channel = channels.open_channel(sock, None, False, seconds)
      option = lambda kind: channel.sock.getsockopt(socket.IPPROTO_TCP, kind)
      assert option(socket.TCP_USER_TIMEOUT) == told  # Milliseconds.
      assert option(socket.TCP_NODELAY)
