"""Where the processes of a replica listen for each other."""

from optax_dist.coordinator.extras.groups import jax_program
from optax_dist.coordinator.transport import addresses


def test_collectives_use_the_address_that_reaches_the_others(monkeypatch):
  assert jax_program._own_address("127.0.0.1") == "127.0.0.1"
  assert jax_program._own_address("::1") == "::1"
  monkeypatch.setattr(addresses, "_source", lambda family, target: target)
  assert jax_program._own_address("10.203.0.1") == "10.203.0.1"
  assert jax_program._own_address("fd00::1") == "fd00::1"


def test_process_0_is_where_the_others_reach_its_transport(monkeypatch):
  here = jax_program._meeting_address("unix:3f9a")
  assert here.startswith("127.0.0.1:")
  # No port that a connection could have by the time that it listens there.
  assert int(here.rpartition(":")[2]) < 29_000
  monkeypatch.setattr(addresses, "is_loopback", lambda host: False)
  far = jax_program._meeting_address("127.0.0.3:29400,unix:3f9a")
  assert far.startswith("127.0.0.3:")
