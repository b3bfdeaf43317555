"""Small arrays of one type that share a message.

An all-reduce costs a latency and a transfer. On TPU and GPU the compiler combines
the all-reduces of one step itself, so nothing is copied there. On CPU it does not,
so small leaves are copied into one buffer if that costs less than separate
messages: over several processes those below 2 MiB; within one process, where an
all-reduce is only a rendezvous of threads, those below 64 KiB.
``benchmarks/cross_shard.py`` measures it.

Leaves never share a buffer if the compiler may have sharded them over other axes of
the mesh (a partly manual ``shard_map``): flattening would gather them.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import axes
from optax_dist._internal.leaves import materialize

# Bytes: leaves at least this large stay separate, over several processes and
# within one.
_ALONE_BETWEEN = 2 << 20
_ALONE_WITHIN = 64 << 10


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
  if axes.platform() != "cpu" or not axes.is_fully_manual():
    return False
  between = jax.process_count() > 1
  return x.nbytes < (_ALONE_BETWEEN if between else _ALONE_WITHIN)


def join(arrays: Sequence[jax.Array]) -> jax.Array:
  """Concatenates arrays along their last axis; a single one is not copied."""
  return arrays[0] if len(arrays) == 1 else jnp.concatenate(arrays, axis=-1)


def split(buffer: jax.Array, sizes: Sequence[int]) -> list[jax.Array]:
  """Undoes :func:`join`, for arrays whose last axis has these sizes.

  What follows them in the buffer is left out.
  """
  if len(sizes) == 1 and buffer.shape[-1] == sizes[0]:
    return [buffer]
  # Slices at constant offsets would be separate kernels to compile.
  starts = materialize.integers([*itertools.accumulate(sizes, initial=0)])
  return [
    jax.lax.dynamic_slice_in_dim(buffer, start, size, axis=-1)
    for start, size in zip(starts, sizes, strict=False)
  ]
