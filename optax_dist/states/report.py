"""The outcomes of each replica's gradients under sync_replicas."""

from typing import Any, NamedTuple

import numpy as np

from optax_dist._internal.placement.replica_blocks import nodes
from optax_dist.transforms.sync_replicas import SyncReplicasState


class SyncReport(NamedTuple):
  """A report on :func:`optax_dist.sync_replicas`, as NumPy arrays on the host.

  Each replica's counts add up: every iteration is ``accepted``, ``absent`` or one of
  ``dropped``, except ``departed``: those gradients were accepted before.

  Attributes:
    global_step: steps taken so far.
    accepted: by replica, gradients accepted so far.
    accumulated: by replica, accepted gradients pending for the next step.
    absent: by replica, iterations without a gradient.
    local_step: by replica, the step that its gradients belong to.
    dropped: by reason (``"stale"``, ``"nonfinite"``, ``"overflow"``,
      ``"departed"``), gradients dropped so far by replica.
  """

  global_step: int
  accepted: np.ndarray
  accumulated: np.ndarray
  absent: np.ndarray
  local_step: np.ndarray
  dropped: dict[str, np.ndarray]

  def __str__(self) -> str:
    """Returns a table, one row per replica."""
    names = ["accepted", "absent", *self.dropped]
    columns = [self.accepted, self.absent, *self.dropped.values()]
    lines = [
      f"global step {self.global_step}",
      "replica  " + "  ".join(f"{name:>9}" for name in names),
    ]
    for i in range(len(self.accepted)):
      cells = "  ".join(f"{column[i]:>9}" for column in columns)
      lines.append(f"{i:>7}  {cells}")
    return "\n".join(lines)


def sync_report(state: Any) -> SyncReport:
  """Reports the outcomes of each replica's gradients.

  Args:
    state: a complete optax state with one :class:`SyncReplicasState` in it,
      outside of the map.

  Returns:
    A :class:`SyncReport`.

  Raises:
    ValueError: if there is not exactly one state of ``sync_replicas``.

  Example:
    >>> import jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.sync_replicas(
    ...   optax.sgd(0.1), "data", replicas_to_aggregate=3, total_num_replicas=4
    ... )
    >>> optax_dist.sync_report(tx.init(jnp.zeros(2))).accepted
    array([0, 0, 0, 0], dtype=int32)
  """
  states = nodes(state, lambda node: isinstance(node, SyncReplicasState))
  if len(states) != 1:
    raise ValueError(
      "sync_report needs a state with exactly one SyncReplicasState in it, got"
      f" {len(states)}."
    )
  state = states[0]
  replica = state.replica.value
  # A state created inside vmap or pmap has a block of one replica per entry.
  host = lambda x: np.asarray(x).reshape(-1)
  prefix = "dropped_"
  return SyncReport(
    global_step=int(host(state.global_step)[0]),
    accepted=host(replica.accepted),
    accumulated=host(replica.num_accumulated),
    absent=host(replica.absent),
    local_step=host(replica.local_step),
    dropped={
      name.removeprefix(prefix): host(getattr(replica, name))
      for name in replica._fields
      if name.startswith(prefix)
    },
  )
