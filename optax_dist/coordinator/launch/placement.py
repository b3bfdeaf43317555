"""Where a job's replicas run: all on this host, or on others, too."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from optax_dist.coordinator.launch import supervisor
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.launch.supervisor import Effect
from optax_dist.coordinator.store import process as store_process


class Placement:
  """The part of a job that runs on this host: here it is all of it.

  Attributes:
    replicas: replicas of the run, on all hosts together.
    processes: processes of each replica; if one dies, the replica restarts.
  """

  def __init__(self, replicas: int, processes: int = 1):
    """Places the replicas."""
    self.replicas, self.processes = replicas, processes

  @property
  def processes_here(self) -> range:
    """The indices of a replica's processes on this host."""
    return range(self.processes)

  def start_store(
    self, secret: bytes
  ) -> tuple[store_process.StoreProcess | None, str]:
    """Starts the store of the job, if it belongs on this host.

    Returns:
      The store, or None if it is on another host; and its address, ``host:port``.
    """
    made = store_process.start(secret, port=0)
    return made, made.address.partition(",")[0]

  def supervisor(self, policy: supervisor.Policy, told: Environment) -> Any:
    """What decides about the replicas of this host: a `Supervisor`, or like one.

    Args:
      policy: what to do about replicas that end with an error; it needs as many
        of them as the run.
      told: the environment of all replicas.
    """
    return supervisor.Supervisor(range(self.replicas), policy)

  def poll(self) -> Sequence[Effect]:
    """Exchanges news with other hosts; returns what follows from them.

    Raises:
      LaunchError: this host can't take part in the run.
    """
    return ()

  def leave(self, words: str) -> None:
    """Called when the launch ends, while the store still runs.

    Args:
      words: what went wrong, for people; "" if nothing has.
    """
