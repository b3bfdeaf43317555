"""Which processes of a job run on this host, and where its store is."""

from __future__ import annotations

from collections.abc import Sequence

from optax_dist.coordinator.launch import supervisor as supervisors
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.store import process as store_process


class LaunchError(RuntimeError):
  """A launched run can't continue.

  Attributes:
    failed: what failed: "replica 2", "the store", or "" if unknown.
    code: the exit code of what failed.
  """

  def __init__(self, failed: str, message: str, code: int = 1):
    super().__init__(message)
    self.failed, self.code = failed, code


class Placement:
  """All replicas run on this host; an extra extends it to several.

  Attributes:
    replicas: replicas of the run.
    processes: processes of each replica: if one dies, the replica restarts.
    local_addr: the address of this host that replicas use; None for any.
    store: the store process; None before `start_store`, or if it is elsewhere.
  """

  def __init__(
    self, replicas: int, processes: int = 1, local_addr: str | None = None
  ):
    """Sets the attributes of the same names.

    Raises:
      ValueError: a number is out of range.
    """
    for name, value in (("replicas", replicas), ("processes", processes)):
      if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}.")
    self.replicas, self.processes = replicas, processes
    self.local_addr = local_addr
    self.store: store_process.StoreProcess | None = None

  def processes_here(self, replica: int) -> range:
    """The indices of a replica's processes on this host."""
    return range(self.processes)

  def start_store(self, secret: str) -> str:
    """Starts the store of the job, if it belongs on this host.

    Args:
      secret: the secret of the job.

    Returns:
      The address of the store.
    """
    self.store = store_process.start(secret.encode(), port=0)
    return self.store.address.partition(",")[0]

  def supervisor(
    self, needed: int, restarts: int, told: Environment
  ) -> supervisors.Supervisor:
    """Creates what decides about the replicas of this host.

    Args:
      needed: how many replicas the run needs to continue.
      restarts: how many restarts are allowed in all.
      told: the environment of all replicas.
    """
    policy = supervisors.Policy(needed=needed, restarts=restarts)
    return supervisors.Supervisor(range(self.replicas), policy)

  def poll(self) -> Sequence[supervisors.Effect]:
    """Lets the supervisor know of other hosts; returns what it decides.

    Raises:
      LaunchError: this host can't take part in the run.
    """
    return ()

  def leave(self, words: str, code: int | None) -> None:
    """Called when the launch ends, while the store still runs.

    Args:
      words: the reason, for people; "" if all replicas have ended.
      code: the exit code of the job; None if it has failed.
    """
