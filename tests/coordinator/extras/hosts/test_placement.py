"""A launcher among others: what it makes of the store and of their notices."""

import waiting

from optax_dist.coordinator.extras.hosts import board, nodes
from optax_dist.coordinator.extras.hosts.placement import HostPlacement
from optax_dist.coordinator.launch import environment, supervisor
from optax_dist.coordinator.transport import addresses


def test_supervisor_learns_why_nothing_can_be_read(monkeypatch):
  monkeypatch.setattr(board, "_TIMEOUT", 0.1)
  address = f"127.0.0.1:{addresses.free_ports()[0]}"
  placed = HostPlacement(nodes.Node(1, 2, address), 2)
  told = environment.Environment(
    secret="a secret of enough bytes", coordinator_address=address
  )
  made = placed.supervisor(supervisor.Policy(), told)

  def is_told():
    placed.poll()
    return "Connection refused" in made.trouble

  waiting.until(is_told, lambda: made.trouble)
  placed.leave("")
