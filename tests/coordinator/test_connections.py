import socket

from optax_dist.coordinator import connections


def test_only_established_connections_to_the_port_count():
  with socket.create_server(("127.0.0.1", 0)) as server:
    port = server.getsockname()[1]
    other = connections.count(port + 1)
    assert connections.count(port) == 0
    with (
      socket.create_connection(("127.0.0.1", port)),
      socket.create_connection(("127.0.0.1", port)),
    ):
      assert connections.count(port) == 2
      assert connections.count(port, except_own=True) == 0
      assert connections.count(port + 1) == other
    first, _ = server.accept()
    first.close()
    second, _ = server.accept()
    second.close()
    assert connections.count(port) == 0
