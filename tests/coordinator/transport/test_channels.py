"""Sockets as the event loop sees them: what a call returns, and what it keeps."""

import socket

from optax_dist.coordinator.transport import channels


def test_the_kernel_gives_up_after_the_same_silence():
  """Of bytes that nobody acknowledges; and small messages go at once."""
  with socket.create_server(("127.0.0.1", 0)) as listener:
    sock = socket.create_connection(listener.getsockname(), 60.0)
    with sock, listener.accept()[0]:
      channel = channels.open_channel(sock, None, False, 2.5)
      option = lambda kind: channel.sock.getsockopt(socket.IPPROTO_TCP, kind)
      assert option(socket.TCP_USER_TIMEOUT) == 2500  # Milliseconds.
      assert option(socket.TCP_NODELAY)
