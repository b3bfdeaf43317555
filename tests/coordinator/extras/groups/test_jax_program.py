"""Where the processes of a replica listen for each other."""

import socket

import pytest

from optax_dist.coordinator.extras.groups import jax_program
from optax_dist.coordinator.transport import addresses


@pytest.mark.parametrize(
  "address", ["127.0.0.1:7", "10.203.0.1:29500", "[fd00::1]:29500"]
)
def test_processes_meet_at_the_given_address(address):
  (place,) = addresses.parse(address)
  assert jax_program._bind_address(place) == address


def test_a_host_name_at_loopback_binds_all_addresses(monkeypatch):
  """Debian has the host's own name at 127.0.1.1."""
  asked = lambda host, *_, **__: [(2, 1, 6, "", ("127.0.1.1", 0))]
  monkeypatch.setattr(addresses.socket, "getaddrinfo", asked)
  (place,) = addresses.parse("debian:7")
  assert jax_program._bind_address(place) == "0.0.0.0:7"


def test_collectives_use_the_address_that_reaches_the_others(monkeypatch):
  assert jax_program._own_address("127.0.0.1") == "127.0.0.1"
  assert jax_program._own_address("::1") == "::1"
  monkeypatch.setattr(addresses, "_source", lambda family, target: target)
  assert jax_program._own_address("10.203.0.1") == "10.203.0.1"
  assert jax_program._own_address("fd00::1") == "fd00::1"
  # Without any such address it is left to them.
  monkeypatch.setattr(addresses, "_source", lambda *_: None)
  assert jax_program._own_address("10.203.0.1") is None


def test_process_0_is_where_the_others_reach_its_transport(monkeypatch):
  here = jax_program._meeting_address("unix:3f9a")
  assert here.startswith("127.0.0.1:")
  # None that some connection may have by the time that it listens there.
  assert int(here.rpartition(":")[2]) < 29_000
  monkeypatch.setattr(addresses, "is_loopback", lambda host: False)
  far = jax_program._meeting_address("127.0.0.3:29400,unix:3f9a")
  host, _, port = far.rpartition(":")
  assert host == "127.0.0.3"
  assert int(port) in jax_program.MEETING_PORTS
  with socket.create_server(("127.0.0.3", int(port))):
    monkeypatch.setattr(jax_program, "MEETING_PORTS", [int(port)])
    with pytest.raises(ValueError, match="None of the ports"):
      jax_program._meeting_address("127.0.0.3:29400")
