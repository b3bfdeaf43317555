"""Places the replicas of a job on several hosts.

Each host has a launcher, which knows its own host only: it starts the processes
that belong there, and starts them again. The launcher of host 0 also keeps the
coordinator running, through which replicas of all hosts find each other.
"""

from __future__ import annotations

import dataclasses

from optax_dist.coordinator.extras.hosts import nodes
from optax_dist.coordinator.launch import placement, supervisor
from optax_dist.coordinator.launch.keeper import Listens
from optax_dist.coordinator.transport import addresses


class HostPlacement(placement.Placement):
  """The part of a job that runs on one of its hosts."""

  def __init__(
    self,
    node: nodes.Node,
    replicas: int,
    processes: int = 1,
    *,
    external: bool = False,
  ):
    """Places the replicas.

    Args:
      node: this host.
      replicas: replicas of the run, on all hosts together.
      processes: processes of each replica.
      external: whether no launcher starts the coordinator.

    Raises:
      ValueError: a number is out of range, or the replicas can't be distributed
        evenly.
    """
    super().__init__(replicas, processes)
    self._node, self._external = node, external
    self._share = node.share(replicas, processes)
    self.address = node.address
    self.rank, self.nodes = node.rank, node.count

  @property
  def replicas_here(self) -> range:
    return self._share.replicas

  @property
  def processes_here(self) -> range:
    return self._share.processes

  def listens(self) -> Listens | None:
    if self._external or self._node.rank:
      return None
    return listens(self._node)

  def policy(self, policy: supervisor.Policy) -> supervisor.Policy:
    """Those on other hosts may be enough, or hold the parameters."""
    elsewhere = self.replicas - len(self._share.replicas)
    needed = max(1, policy.needed - elsewhere)
    return dataclasses.replace(policy, needed=needed, whole=not elsewhere)


def listens(node: nodes.Node) -> Listens:
  """Where the coordinator of a job listens on its host 0."""
  assert node.address is not None
  bind, port = node.listens_at()
  return Listens(bind, port, addresses.parse(node.address)[-1].host)
