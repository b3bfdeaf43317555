"""Where a job's replicas run: all on this host, or on others, too."""

from __future__ import annotations

from optax_dist.coordinator.launch import supervisor
from optax_dist.coordinator.launch.keeper import Listens
from optax_dist.coordinator.transport import addresses


class Placement:
  """The part of a job that runs on this host: here it is all of it.

  Attributes:
    replicas: replicas of the run, on all hosts together.
    processes: processes of each replica; if one dies, the replica restarts.
    address: the coordinator's address, ``host:port``; None for one that `listens`
      finds.
    rank: the index of this host among those of the job.
    nodes: how many hosts the job has.
  """

  address: str | None = None
  rank, nodes = 0, 1

  def __init__(self, replicas: int, processes: int = 1):
    """Places the replicas."""
    self.replicas, self.processes = replicas, processes

  @property
  def replicas_here(self) -> range:
    """The replicas that have processes on this host."""
    return range(self.replicas)

  @property
  def processes_here(self) -> range:
    """The indices of a replica's processes on this host."""
    return range(self.processes)

  def listens(self) -> Listens | None:
    """Where the coordinator of the job listens; None if it is on another host.

    Raises:
      ValueError: this host can't listen there.
    """
    (port,) = addresses.free_ports()
    return Listens("127.0.0.1", port)

  def policy(self, policy: supervisor.Policy) -> supervisor.Policy:
    """What to do about replicas of this host, given what the run needs."""
    return policy
