"""Where a job's replicas run.

Each host has a launcher, which knows its own host only: it starts the processes
that belong there, and starts them again. The launcher of host 0 also keeps the
coordinator running, through which replicas of all hosts find each other.
"""

from __future__ import annotations

import dataclasses

from optax_dist.coordinator.launch.nodes import Node, Share


@dataclasses.dataclass(frozen=True)
class Placement:
  """The replicas of a job, and which of their processes run on this host.

  Attributes:
    replicas: replicas of the run, on all hosts together.
    processes: processes of each replica; if one dies, the replica restarts.
    node: this host.
    external: whether no launcher starts the coordinator.
  """

  replicas: int
  processes: int = 1
  node: Node = dataclasses.field(default_factory=Node)
  external: bool = False

  @property
  def here(self) -> Share:
    """What runs on this host.

    Raises:
      ValueError: the replicas can't be distributed evenly.
    """
    return self.node.share(self.replicas, self.processes)

  @property
  def elsewhere(self) -> int:
    """How many replicas have no process on this host."""
    return self.replicas - len(self.here.replicas)
