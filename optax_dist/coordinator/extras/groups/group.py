"""A replica of several processes, as seen by one of them.

    process 0    RankZero(Client)  <-  reports  --  process 1 ..  WorkerRank
                                   --  orders   ->

Process 0 decides for all processes. Each process exchanges its own shards with its
counterparts in the other replicas.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import jax

from optax_dist.coordinator import errors, strategies
from optax_dist.coordinator.extras.groups import commands, jax_program, shards
from optax_dist.coordinator.extras.groups.inbox import GroupInbox
from optax_dist.coordinator.extras.groups.rank_zero import RankZero
from optax_dist.coordinator.extras.groups.worker_rank import WorkerRank
from optax_dist.coordinator.launch import channel
from optax_dist.coordinator.launch.environment import ProcessEnvironment
from optax_dist.coordinator.protocol.client.client import Client
from optax_dist.coordinator.protocol.codec import Codec
from optax_dist.coordinator.protocol.config import Config, Me
from optax_dist.coordinator.runtime import process_exit, processes, trees
from optax_dist.coordinator.runtime.inbox import TrainingInbox
from optax_dist.coordinator.runtime.states import State
from optax_dist.coordinator.transport import tls

_log = logging.getLogger("optax_dist.coordinator")
# Seconds for a program to end by itself when its replica can't continue.
_GRACE = 5.0


class Group(processes.Processes):
  """The processes of this replica, of which there are several."""

  codec: Codec[Any] = commands.WIRE

  def __init__(
    self,
    index: int,
    count: int,
    gather: Callable[[str], list[str]],
    on_loss: Callable[[str], None] = lambda reason: None,
    joins: Callable[[], None] = lambda: None,
  ):
    """Describes this process.

    Args:
      index: index of this process, from 0.
      count: the number of processes.
      gather: given a text, returns the texts of all processes, in order; all processes
        call it at the same point of the program.
      on_loss: called when a process of the replica is lost, since the other processes
        can't continue.
      joins: called when the replica joins a run, and so detects losses by itself.
    """
    self.index, self.count = index, count
    self._gather, self._on_loss, self._joins = gather, on_loss, joins
    self._addresses: list[tuple[str, str]] = []

  def name(self, replica: object) -> object:
    return f"{replica}.{self.index}"

  def gather(self, text: str) -> list[str]:
    return self._gather(text)

  def meet(self, own: tuple[str, str], digest: str) -> tuple[str, str]:
    members = [json.loads(x) for x in self.gather(json.dumps([*own, digest]))]
    self._addresses = [(name, address) for name, address, _ in members]
    digests = [digest for _, _, digest in members]
    return commands.join_addresses(self._addresses), commands.combined(digests)

  def core(self, config: Config, me: Me) -> processes.Core:
    self._joins()
    if self.index:
      return WorkerRank(self._addresses[0][0])
    workers, timeout = self._addresses[1:], config.deadlines.timeout
    return RankZero(Client(config, me), workers, timeout)

  def parts(
    self,
    strategy: strategies.Strategy,
    params: Any,
    shared: Any,
    inner: Any = None,
  ) -> processes.Parts:
    if strategy.loop is not None:
      raise ValueError(
        f"{strategy.name!r} is for replicas of one process, got one of"
        f" {self.count}: each process applies a mean when it arrives, and a"
        " step of all processes together needs it at the same time. Make each"
        " process a replica of its own (without initialize_processes), or have"
        " one process drive all devices of a host."
      )
    apply = strategy.apply
    agreement: tuple[tuple[str, str], ...] = (
      ("processes per replica", str(self.count)),
    )
    if not trees.is_local(params):
      agreement += shards.agreement(params)
      mesh = shards.mesh_of(params)
      shared, inner = shards.spread((shared, inner), mesh)
      apply = jax.jit(
        strategy.apply,
        out_shardings=jax.tree.map(lambda x: x.sharding, shared),
      )
    return processes.Parts(
      shared,
      inner,
      apply,
      shards.LocalShards(jax.tree.leaves(params)),
      shards.LocalShards(jax.tree.leaves((shared, inner))),
      agreement,
    )

  def inbox(
    self, published: State, enqueue: Callable[[Any], None], timeout: float
  ) -> TrainingInbox:
    leads = not self.index
    return GroupInbox(published, enqueue, leads, timeout, self._on_loss)


def initialize_processes(
  count: int | None = None,
  *,
  certificates: tls.Certificates | None = None,
) -> None:
  """Makes the processes of this replica one JAX program.

  Call it before anything else in a process started by `optax-dist launch
  --processes-per-replica`: the processes find each other through the coordinator,
  wherever they are, and `jax.distributed.initialize` is called for them. A program
  that has called it with the replica's own address passes `count`. If the replica
  has one process, it does nothing.

  Args:
    count: the number of processes; by default OPTAX_DIST_NUM_PROCESSES, or 1.
    certificates: see `join`.

  Raises:
    ValueError: a variable is invalid, or the program has another number of
      processes.
    CoordinatorError: the other processes have not come in 300 s, or the
      coordinator has not answered.

  Example:
    >>> initialize_processes()  # Nobody has started several.
    >>> jax.process_count()
    1
  """
  joins: Callable[[], None] = lambda: None
  if count is None:
    count = ProcessEnvironment.read().num_processes or 1
    if count > 1:
      with channel.refused_by(errors.JoinRefused, tls.CertificateError):
        joins = jax_program.meet(_end_soon, certificates).close
  if count == 1:
    return
  if jax.process_count() != count:
    raise ValueError(
      f"The replica has {count} processes, and this JAX program has"
      f" {jax.process_count()}. Call jax.distributed.initialize in each of them"
      " first, with the replica's own address."
    )
  index = jax.process_index()
  processes.use(Group(index, count, jax_program.gather, _end_soon, joins))


def _end_soon(reason: str) -> None:
  """Ends this process, in case it hangs in a collective with a lost process."""

  def end() -> None:
    time.sleep(_GRACE)
    process_exit.end_process(f"{reason} This process ends, too.")

  threading.Thread(target=end, name="optax-dist-end", daemon=True).start()
