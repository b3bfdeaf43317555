"""The hosts of a job: which one this is, and which processes it runs."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from optax_dist.coordinator.launch import cluster
from optax_dist.coordinator.launch.environment import (
  Environment,
  HostEnvironment,
)
from optax_dist.coordinator.transport import addresses


class Share(NamedTuple):
  """The part of a job's replicas that runs on a host.

  Attributes:
    replicas: the indices of those that have processes here.
    processes: of each of these, the indices of the processes here.
  """

  replicas: range
  processes: range


@dataclasses.dataclass(frozen=True)
class Node:
  """One host of a job.

  Attributes:
    rank: its index, from 0; the coordinator is on host 0.
    count: the number of hosts.
    address: ``host:port`` of the coordinator, as all hosts reach it; None for a
      free port of this host, or if it is found in a store.
    local_addr: this host's address in the network that replicas use, if it has
      several; None for the address from which it reaches the coordinator.
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

  def share(self, replicas: int, processes: int = 1) -> Share:
    """The part of the job's replicas that runs on this host.

    Replicas are distributed in order. With fewer replicas than hosts, each is
    on equally many hosts, and so are its processes, in order.

    Args:
      replicas: number of replicas in the job.
      processes: processes of each replica.

    Raises:
      ValueError: they can't be distributed evenly.

    Example:
      >>> [Node(rank, 2).share(5).replicas for rank in (0, 1)]
      [range(0, 2), range(2, 5)]
      >>> Node(3, 4).share(2, processes=2)
      Share(replicas=range(1, 2), processes=range(1, 2))
    """
    rank, count = self.rank, self.count
    if replicas >= count:
      first, last = (replicas * r // count for r in (rank, rank + 1))
      return Share(range(first, last), range(processes))
    each, rest = divmod(count, replicas)
    if rest:
      raise ValueError(
        f"{count} hosts can't be shared out among {replicas} replicas: with fewer"
        " replicas than hosts, there must be the same number of hosts for each."
      )
    if processes < each:
      raise ValueError(
        f"Each replica is on {each} hosts, because there are {count} hosts and"
        f" {replicas} replicas; then it needs at least {each} processes, got"
        f" {processes}."
      )
    replica, index = divmod(rank, each)
    return Share(
      range(replica, replica + 1),
      range(*(processes * i // each for i in (index, index + 1))),
    )


def find(host: HostEnvironment, environment: Environment) -> Node:
  """Finds out which host this is.

  Args:
    host: by arguments or variables. What it lacks is taken from the cluster that
      JAX detects (SLURM, GKE, TPU pods, Open MPI), where each launcher is one
      process. Without any of these this is the only host.
    environment: of the job. With a `store` there need be no address.

  Raises:
    ValueError: a part is missing, or inconsistent with the others.

  Example:
    >>> host = HostEnvironment(node_rank=1, nodes=2, address="10.0.0.1:29300")
    >>> find(host, Environment())
    Node(rank=1, count=2, address='10.0.0.1:29300', local_addr=None)
  """
  known = host.address, host.nodes, host.node_rank
  if known == (None, None, None):
    known = cluster.detect_cluster() or (None, 1, 0)
  address, count, rank = known
  if count == 1:
    return Node(rank or 0, 1, host.address, environment.local_addr)
  if environment.store is not None:
    address = address or ""  # Nobody asks for it.
  address, count, rank = cluster.complete(
    {"address": address, "nodes": count, "node_rank": rank}
  )
  return Node(rank, count, address or None, environment.local_addr)
