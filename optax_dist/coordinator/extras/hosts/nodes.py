"""The hosts of a job: which one this is, and which processes it runs."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping

from optax_dist.coordinator.launch.environment import PREFIX
from optax_dist.coordinator.transport import addresses

RANK, NODES, ADDRESS, LOCAL_ADDR = (
  PREFIX + name for name in ("NODE_RANK", "NODES", "ADDRESS", "LOCAL_ADDR")
)


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
    """Where the store listens: an address of this host, and a port or 0."""
    if self.address is None:
      return "127.0.0.1", 0
    place = addresses.parse(self.address)[-1]
    # A name or address of this host that isn't an address of its own (a
    # service, a mapped port) leads to one of its addresses.
    host = place.host
    if not addresses.is_own(host):
      host = "::" if ":" in host else "0.0.0.0"
    return host, place.port


def find(
  rank: int | None = None,
  count: int | None = None,
  address: str | None = None,
  environ: Mapping[str, str] | None = None,
  local_addr: str | None = None,
) -> Node:
  """Finds out which host this is, each part from the first source that has it.

  The sources are the arguments, the variables OPTAX_DIST_NODE_RANK,
  OPTAX_DIST_NODES, OPTAX_DIST_ADDRESS and OPTAX_DIST_LOCAL_ADDR, and the
  cluster that JAX detects (SLURM, GKE, TPU pods, Open MPI), where each launcher
  is one process. Without any of them this is the only host.

  Raises:
    ValueError: a part is missing, or inconsistent with the others.

  Example:
    >>> find(1, 2, "10.0.0.1:29300", {})
    Node(rank=1, count=2, address='10.0.0.1:29300', local_addr=None)
  """
  environ = os.environ if environ is None else environ
  rank = _number(environ, RANK) if rank is None else rank
  count = _number(environ, NODES) if count is None else count
  address = address or environ.get(ADDRESS) or None
  own = local_addr or environ.get(LOCAL_ADDR) or None
  if rank is None and count is None and address is None:
    from optax_dist.coordinator import cluster

    address, count, rank = cluster.detect_cluster() or (None, 1, 0)
    return Node(rank, count, address if count > 1 else None, own)
  if count == 1:
    return Node(rank or 0, 1, address, own)
  parts = {"--node-rank": rank, "--nodes": count, "--address": address}
  missing = ", ".join(name for name, value in parts.items() if value is None)
  if rank is None or count is None or address is None:
    raise ValueError(
      f"Of several hosts each needs --node-rank, --nodes and --address, or"
      f" {RANK}, {NODES} and {ADDRESS}; {missing} is missing."
    )
  return Node(rank, count, address, own)


def _number(environ: Mapping[str, str], name: str) -> int | None:
  text = environ.get(name, "")
  if text and not text.isdecimal():
    raise ValueError(f"{name} must be a whole number; got {text!r}.")
  return int(text) if text else None
