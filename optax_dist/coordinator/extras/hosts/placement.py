"""Places the replicas of a job on several hosts.

Each host has a launcher, which starts the processes that belong there. Host 0
starts the store, unless the job has one, in which the launchers leave notices
for each other.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import random
import secrets
import socket
import time
from collections.abc import Sequence

from optax_dist.coordinator.extras.hosts import board, nodes
from optax_dist.coordinator.extras.hosts.notices import Notice
from optax_dist.coordinator.extras.hosts.peers import Peers
from optax_dist.coordinator.extras.hosts.supervisor import (
  HostSupervisor,
  LauncherEnds,
  NoticeRead,
)
from optax_dist.coordinator.launch import placement, supervisor
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.launch.launcher import LaunchError
from optax_dist.coordinator.launch.supervisor import Effect
from optax_dist.coordinator.store import process as store_process
from optax_dist.coordinator.store import urls
from optax_dist.coordinator.transport import addresses

# Seconds to tell other hosts that this one ends, and that the store waits for
# their replicas after a run that went well.
_FAREWELL, _LAST_CLIENTS = 3.0, 30.0
# Ports for process 0 of a replica on several hosts: the first free one.
MEETING_PORTS = range(29500, 29600)


def own_address(local_addr: str | None, store_host: str) -> addresses.Ip:
  """The IP address of this host that other hosts use.

  Args:
    local_addr: the one that was chosen; None for that from which this host
      reaches the store.
    store_host: the store's host.

  Raises:
    ValueError: there is none.
  """
  own = addresses.own(local_addr, store_host)
  if own is None:
    return addresses.bound(store_host)
  return addresses.bound(addresses.advertised(own.text, store_host))


def start_store(node: nodes.Node, secret: bytes) -> store_process.StoreProcess:
  """Starts the store of a job on its host 0.

  Args:
    node: host 0.
    secret: the secret of the job.

  Raises:
    RuntimeError: the address is taken, or is not one of this host.
    TimeoutError: the store is not ready in time.
  """
  assert node.address is not None
  bind, port = node.listens_at()
  advertise = addresses.parse(node.address)[-1].host
  return store_process.start(secret, bind=bind, port=port, advertise=advertise)


def unreached(node: nodes.Node, is_external: bool, trouble: str) -> str:
  """Why a launcher does not reach the store, and what to do.

  Args:
    node: its host.
    is_external: whether the store is not started by host 0.
    trouble: what happened.
  """
  words = f"The store of the job does not answer: {trouble}."
  if is_external:
    return f"{words} --store must lead to it, also from this host."
  if node.rank == 0:
    return (
      f"{words} This is host 0, which has started it: --address must lead here."
    )
  return (
    f"{words} The launcher of host 0 (--node-rank 0) starts it at --address; the"
    " secret must be the same there, and a firewall must let the port through."
  )


def launcher_notice(
  node: nodes.Node,
  replicas: int,
  processes: int,
  told: Environment,
) -> Notice:
  """The first notice of a launcher, with what must be equal on all hosts.

  Args:
    node: this host.
    replicas: replicas of the run.
    processes: processes of each replica.
    told: the environment of all replicas.
  """
  settings = {
    "--nodes": node.count,
    "--replicas": replicas,
    "--processes-per-replica": processes,
    "--replicas-to-aggregate": told.replicas_to_aggregate,
    "--min-replicas": told.min_replicas,
  }
  return Notice(
    secrets.token_hex(8),
    f"{socket.gethostname()}, process {os.getpid()}",
    tuple((flag, str(value)) for flag, value in settings.items()),
  )


class HostPlacement(placement.Placement):
  """The part of a job that runs on one of its hosts."""

  def __init__(
    self,
    node: nodes.Node,
    replicas: int,
    processes: int = 1,
    *,
    silence: float = 60.0,
  ):
    """Places the replicas; `supervisor` begins.

    Args:
      node: this host.
      replicas: replicas of the run, on all hosts together.
      processes: processes of each replica.
      silence: see `Peers`.

    Raises:
      ValueError: a number is out of range, or the replicas can't be distributed
        evenly.
    """
    super().__init__(replicas, processes)
    self._node = node
    self._silence = silence
    self._share = node.share(replicas, processes)
    # In random order, since the launchers of a host would collide.
    ports = random.sample(MEETING_PORTS, len(MEETING_PORTS))
    self._ports = itertools.cycle(ports)
    self._start = time.monotonic()
    self._said_trouble = False
    self._supervisor: HostSupervisor | None = None
    self._board: board.Board | None = None
    self._store: store_process.StoreProcess | None = None

  @property
  def processes_here(self) -> range:
    return self._share.processes

  def start_store(
    self, secret: bytes
  ) -> tuple[store_process.StoreProcess | None, str]:
    assert self._node.address is not None
    if self._node.rank == 0:
      self._store = start_store(self._node, secret)
    return self._store, self._node.address

  def supervisor(
    self, policy: supervisor.Policy, told: Environment
  ) -> HostSupervisor:
    """Connects to the launchers of other hosts, and decides with them."""
    assert told.secret is not None
    node, share = self._node, self._share
    self._start = time.monotonic()
    peers = Peers(
      node.rank,
      launcher_notice(node, self.replicas, self.processes, told),
      # Host 0 compares the settings of all.
      {0, *share.hosts} if node.rank else range(node.count),
      self._start,
      self._silence,
    )
    store = urls.parse(told.store or f"tcp://{told.coordinator_address}")
    elsewhere = self.replicas - len(share.replicas)
    policy = dataclasses.replace(
      policy, needed=max(1, policy.needed - elsewhere), whole=not elsewhere
    )
    self._supervisor = HostSupervisor(
      share, policy, peers, lambda: self._meeting_address(store)
    )
    self._board = board.Board(
      store,
      told.secret.encode(),
      told.run or "",
      node.rank,
      peers.hosts,
    )
    self._is_external = told.store is not None
    return self._supervisor

  def poll(self) -> Sequence[Effect]:
    """Writes this host's notice, and reads those of others."""
    if self._board is None or self._supervisor is None:
      return ()
    if self._supervisor.writes:
      self._board.publish(self._supervisor.notice)
    effects = self._check_reach(self._board, self._supervisor.peers.meet)
    self._supervisor.trouble = self._board.trouble
    for host, notice in self._board.poll():
      read = NoticeRead(host, notice)
      effects += self._supervisor.step(read, time.monotonic())
    return effects

  def leave(self, words: str) -> None:
    """Tells other hosts that this one ends, and why."""
    if self._board is not None and self._supervisor is not None:
      made, self._board = self._board, None
      self._supervisor.step(LauncherEnds(words), time.monotonic())
      if self._supervisor.writes:
        made.publish(self._supervisor.notice)
      made.close(_FAREWELL if made.reached else 0.0)
    if self._store is not None:
      # They still have to read the notice, or to finish.
      self._store.drain(_FAREWELL if words else _LAST_CLIENTS)

  def _meeting_address(self, store: urls.Place) -> str:
    """An address of this host for process 0 of a replica on several hosts."""
    try:
      if addresses.own(self._node.local_addr, store.host) is None:
        return f"127.0.0.1:{addresses.free_ports()[0]}"
      ip = own_address(self._node.local_addr, store.host)
    except ValueError as error:
      raise LaunchError(str(error)) from error
    for port in itertools.islice(self._ports, len(MEETING_PORTS)):
      with contextlib.suppress(OSError), socket.socket(ip.family) as probe:
        probe.bind(ip.place(port))
        return str(addresses.Endpoint(ip.text, port))
    raise LaunchError(
      f"None of the ports {MEETING_PORTS[0]} to {MEETING_PORTS[-1]} of {ip.text} is"
      " free, where processes of a replica would meet.",
    )

  def _check_reach(self, notices: board.Board, most: float) -> list[Effect]:
    """Says what this launcher waits for, and until when."""
    if notices.reached or not notices.trouble:
      return []
    waited = time.monotonic() - self._start
    late = waited >= most
    if self._said_trouble and not late:
      return []
    self._said_trouble = True
    words = unreached(self._node, self._is_external, notices.trouble)
    if late:
      raise LaunchError(f"{words} It was waited for {waited:.0f} s.")
    return [supervisor.Say(words)]
