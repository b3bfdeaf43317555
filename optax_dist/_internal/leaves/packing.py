"""Small arrays of one type that share a message between CPU processes.

Each all-reduce between processes costs a latency. On TPU and GPU the compiler combines
the all-reduces of one step itself; on CPU it does not, so there leaves below 2 MiB are
copied into one buffer (``benchmarks/cross_shard.py`` measures it). Within one process
an all-reduce is only a rendezvous of threads, and nothing is copied.

Leaves never share a buffer if the compiler may have sharded them over other axes of
the mesh (a partly manual ``shard_map``): flattening would gather them.
"""

from collections.abc import Sequence
from typing import Any

import jax

from optax_dist._internal import axes

# Bytes: leaves at least this large stay separate.
_ALONE = 2 << 20


def together(
  leaves: Sequence[jax.Array], names: Sequence[tuple[axes.AxisName, ...]]
) -> list[list[int]]:
  """Returns which leaves share a message.

  Args:
    leaves: arrays.
    names: for each leaf, the bound axes that it is sent over; an empty tuple for
      a leaf that is not sent.

  Returns:
    The indices of the leaves in each message.
  """
  messages: dict[Any, list[int]] = {}
  for i, (x, over) in enumerate(zip(leaves, names, strict=True)):
    # A buffer has one type, so only leaves of equal types share one.
    kind = x.dtype, axes.varying_axes(x), over
    messages.setdefault(kind if _is_small(x, over) else i, []).append(i)
  return list(messages.values())


def _is_small(x: jax.Array, over: tuple[axes.AxisName, ...]) -> bool:
  if not over or not axes.mesh_axes().issuperset(over):
    return False
  if axes.platform() != "cpu" or jax.process_count() == 1:
    return False
  mesh = jax.sharding.get_abstract_mesh()
  return len(mesh.manual_axes) == len(mesh.axis_names) and x.nbytes < _ALONE
