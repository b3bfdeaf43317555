"""The hosts of a job: which one this is, and which processes it runs."""

from __future__ import annotations

import dataclasses

from optax_dist.coordinator.launch.environment import Environment, variable
from optax_dist.coordinator.transport import addresses


@dataclasses.dataclass(frozen=True)
class Place:
  """The part of a replica that runs on a host.

  Attributes:
    replica: its index.
    processes: the indices of its processes on this host.
    hosts: all hosts on which it has processes; the first of them decides when
      it starts.
  """

  replica: int
  processes: range
  hosts: range


@dataclasses.dataclass(frozen=True)
class Node:
  """One host of a job.

  Attributes:
    rank: its index, from 0; the store is on host 0.
    count: the number of hosts.
    address: ``host:port`` of the store, as all hosts reach it; None for a free
      port of this host.
    local_addr: this host's address in the network that replicas use, if it has
      several; None for the address from which it reaches the store.
  """

  rank: int = 0
  count: int = 1
  address: str | None = None
  local_addr: str | None = None

  def __post_init__(self) -> None:
    if not 0 <= self.rank < self.count:
      raise ValueError(
        f"The rank of a host is from 0 to {self.count - 1}, as there are"
        f" {self.count}; got {self.rank}."
      )
    if self.address is not None:
      addresses.parse(self.address)
    if self.local_addr is not None and not addresses.is_own(self.local_addr):
      raise ValueError(
        "The address of --local-addr must be one of this host, without a port;"
        f" got {self.local_addr!r}."
      )

  def places(
    self, replicas: int, processes: int = 1, nodes: int | None = None
  ) -> list[Place]:
    """The parts of the job's replicas that run on this host.

    Replicas are distributed in order, and so are the processes of a replica
    over its hosts.

    Args:
      replicas: number of replicas in the job.
      processes: processes of each replica.
      nodes: hosts of each replica; by default 1, or, with fewer replicas than
        hosts, as many as there are for each.

    Raises:
      ValueError: they can't be distributed evenly.

    Example:
      >>> [[p.replica for p in Node(rank, 2).places(5)] for rank in (0, 1)]
      [[0, 1], [2, 3, 4]]
      >>> Node(3, 4).places(2, processes=2)
      [Place(replica=1, processes=range(1, 2), hosts=range(2, 4))]
    """
    if nodes is None:
      nodes = max(1, self.count // replicas)
    blocks, rest = divmod(self.count, nodes)
    if rest or replicas < blocks:
      raise ValueError(
        f"{self.count} hosts can't be shared out among {replicas} replicas, with"
        f" {nodes} for each: there must be a whole number of times {nodes} hosts,"
        " and a replica for each of these."
      )
    if processes < nodes:
      raise ValueError(
        f"Each replica is on {nodes} hosts, because there are {self.count} hosts and"
        f" {replicas} replicas; then it needs at least {nodes} processes, got"
        f" {processes}."
      )
    block, index = divmod(self.rank, nodes)
    first, last = (replicas * b // blocks for b in (block, block + 1))
    own = range(*(processes * i // nodes for i in (index, index + 1)))
    hosts = range(block * nodes, (block + 1) * nodes)
    return [Place(r, own, hosts) for r in range(first, last)]

  def listens_at(self) -> tuple[str, int]:
    """Where the store listens: an address of this host, and a port."""
    assert self.address is not None
    place = addresses.parse(self.address)[-1]
    # A name or address of this host that isn't an address of its own (a
    # service, a mapped port) leads to one of its addresses.
    host = place.host
    if not addresses.is_own(host):
      host = "::" if ":" in host else "0.0.0.0"
    return host, place.port


def find(told: Environment) -> Node:
  """Finds out which host this is.

  Args:
    told: what the launcher was told, by arguments or variables. If it has
      neither `node_rank`, `nodes` nor `address`, they are taken from the cluster
      that JAX detects (SLURM, GKE, TPU pods, Open MPI), where each launcher is
      one process. Without one this is the only host.

  Raises:
    ValueError: a part is missing, or inconsistent with the others.

  Example:
    >>> find(Environment(node_rank=1, nodes=2, address="10.0.0.1:29300"))
    Node(rank=1, count=2, address='10.0.0.1:29300', local_addr=None)
  """
  rank, count, address = told.node_rank, told.nodes, told.address
  if rank is None and count is None and address is None:
    from optax_dist.coordinator.launch import cluster

    address, count, rank = cluster.detect_cluster() or (None, 1, 0)
    address = address if count > 1 else None
  if count == 1:
    rank = rank or 0
  parts = {"node_rank": rank, "nodes": count, "address": address}
  if count != 1 and None in parts.values():
    missing = ", ".join(
      f"--{name.replace('_', '-')} ({variable(name)})"
      for name, value in parts.items()
      if value is None
    )
    raise ValueError(
      "Of several hosts each needs --node-rank, --nodes and --address;"
      f" {missing} is missing."
    )
  assert rank is not None
  assert count is not None
  return Node(rank, count, address, told.local_addr)
