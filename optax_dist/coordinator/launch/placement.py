"""Where a job's replicas run: its hosts, and which one this is.

Each host has a launcher, which knows its own host only: it starts the processes
that belong there, and starts them again. The launcher of host 0 also keeps the
coordinator running, through which replicas of all hosts find each other.
"""

from __future__ import annotations

import dataclasses

from optax_dist.coordinator.launch import cluster
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.transport import addresses


@dataclasses.dataclass(frozen=True)
class Placement:
  """The replicas of a job, and which of their processes run on this host.

  Replicas are distributed in order. With fewer replicas than hosts, each is on
  equally many hosts, and so are its processes, in order.

  Attributes:
    replicas: replicas of the run, on all hosts together.
    processes: processes of each replica; if one dies, the replica restarts.
    rank: the index of this host, from 0; the coordinator is on host 0.
    hosts: the number of hosts.
    address: ``host:port`` of the coordinator, as all hosts reach it; None for a
      free port of this host, or if it is found in a store.
    local_addr: this host's address in the network that replicas use, if it has
      several; None for the address from which it reaches the coordinator.
    external: whether no launcher starts the coordinator.

  Example:
    >>> [Placement(5, rank=rank, hosts=2).here for rank in (0, 1)]
    [range(0, 2), range(2, 5)]
    >>> last = Placement(2, processes=2, rank=3, hosts=4)
    >>> last.here, last.processes_here
    (range(1, 2), range(1, 2))
  """

  replicas: int
  processes: int = 1
  rank: int = 0
  hosts: int = 1
  address: str | None = None
  local_addr: str | None = None
  external: bool = False

  def __post_init__(self) -> None:
    """Checks it.

    Raises:
      ValueError: there is no such host, or the replicas can't be distributed
        evenly.
    """
    if not 0 <= self.rank < self.hosts:
      raise ValueError(
        f"The rank of a host is from 0 to {self.hosts - 1}, as there are"
        f" {self.hosts}; got {self.rank}."
      )
    if self.address is not None:
      addresses.endpoint(self.address)
    if self.local_addr is not None and not addresses.is_own(self.local_addr):
      raise ValueError(
        "The address of --local-addr must be one of this host, without a port;"
        f" got {self.local_addr!r}."
      )
    each = self._hosts_of_one
    if self.replicas < self.hosts != each * self.replicas:
      raise ValueError(
        f"{self.hosts} hosts can't be shared out among {self.replicas} replicas:"
        " with fewer replicas than hosts, there must be the same number of hosts"
        " for each."
      )
    if self.processes < each:
      raise ValueError(
        f"Each replica is on {each} hosts, because there are {self.hosts} hosts and"
        f" {self.replicas} replicas; then it needs at least {each} processes, got"
        f" {self.processes}."
      )

  @property
  def here(self) -> range:
    """The indices of the replicas that have processes on this host."""
    each = self._hosts_of_one
    return _part(self.replicas, self.rank // each, self.hosts // each)

  @property
  def processes_here(self) -> range:
    """Of each of these, the indices of the processes on this host."""
    each = self._hosts_of_one
    return _part(self.processes, self.rank % each, each)

  @property
  def elsewhere(self) -> int:
    """How many replicas have no process on this host."""
    return self.replicas - len(self.here)

  @property
  def _hosts_of_one(self) -> int:
    """On how many hosts each replica is."""
    return max(1, self.hosts // self.replicas)


def _part(count: int, index: int, parts: int) -> range:
  """One of nearly equal parts of so many things."""
  return range(count * index // parts, count * (index + 1) // parts)


def find(
  environment: Environment,
  processes: int = 1,
  external: bool = False,
) -> Placement:
  """Finds out which host this is.

  Args:
    environment: of the job. What it lacks is taken from the cluster that JAX
      detects (SLURM, GKE, TPU pods, Open MPI), where each launcher is one process.
      Without any of these this is the only host. With a `store` there need be no
      address. By default there is a replica for each host.
    processes: see `Placement`.
    external: see `Placement`.

  Raises:
    ValueError: a part is missing, or inconsistent with the others.

  Example:
    >>> host = Environment(node_rank=1, nodes=2, address="10.0.0.1:29300")
    >>> found = find(host)
    >>> found.rank, found.hosts, found.address, found.replicas
    (1, 2, '10.0.0.1:29300', 2)
  """
  known = environment.address, environment.nodes, environment.node_rank
  if known == (None, None, None):
    known = cluster.detect_cluster() or (None, 1, 0)
  address, hosts, rank = known
  if hosts == 1:
    address, rank = environment.address, rank or 0
  else:
    if environment.store is not None:
      address = address or ""  # With etcd, replicas find the address there.
    address, hosts, rank = cluster.complete(
      {"address": address, "nodes": hosts, "node_rank": rank}
    )
  return Placement(
    environment.num_replicas or hosts,
    processes,
    rank,
    hosts,
    address or None,
    environment.local_addr,
    external,
  )
