"""Packs small arrays into one buffer if that is faster.

**When leaves share a buffer.** An all-reduce costs a latency and a transfer. On
TPU and GPU the compiler combines the all-reduces of one step itself, so leaves
are passed one by one and nothing is copied. On CPU it does not, so leaves of
one dtype are copied into one buffer if that costs less than separate messages:
over several processes those below 2 MiB; within one process, where an
all-reduce is only a rendezvous of threads, those below 64 KiB, the smallest
first, up to 8 MiB in all (copies beyond the caches and the allocator's pools
cost more than they save). ``benchmarks/cross_shard.py`` measures it.

Arithmetic on a buffer is one kernel for all of its leaves, instead of one per
leaf: it is faster to compile and to start.

Leaves never share a buffer if the compiler may have sharded them over other
axes of the mesh (a partly manual ``shard_map``): flattening would gather them.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_dist._internal import axes
from optax_dist._internal.leaves import materialize

# Bytes: leaves at least this large stay separate, over several processes and
# within one; and the largest shared buffer within one process.
_ALONE_BETWEEN = 2 << 20
_ALONE_WITHIN = 64 << 10
_BUFFER_WITHIN = 8 << 20
# Bytes, of parameters and what is like them, that are read again rather than copied.
_READ_AGAIN = 4 * _BUFFER_WITHIN


class Joined(NamedTuple):
  """The position of a leaf.

  Attributes:
    leaf: the leaf.
    buffer: the buffer that contains it.
    start: its offset in the buffer.
  """

  leaf: Any
  buffer: Any
  start: int


def one_piece(leaves: Sequence[Joined | None]) -> Any:
  """Returns several leaves as one array if they are contiguous; otherwise None.

  Args:
    leaves: the position of each; None for one that is in no buffer.
  """
  found = [x for x in leaves if x is not None]
  if len(found) < len(leaves):
    return None
  buffer, start = found[0].buffer, found[0].start
  end = start
  for x in found:
    if x.buffer is not buffer or x.start != end:
      return None
    end += math.prod(jnp.shape(x.leaf))
  return jax.lax.slice(buffer, (start,), (end,))


@dataclasses.dataclass(frozen=True)
class Packing:
  """Which leaves of a list share a buffer.

  Attributes:
    buckets: for each buffer, the indices of its leaves: several, or a single
      one that is not copied.
    shapes: of the leaves.
    starts: for each buffer, the offsets of its leaves, as int32 scalars.
  """

  buckets: tuple[tuple[int, ...], ...]
  shapes: tuple[tuple[int, ...], ...]
  starts: tuple[tuple[jax.Array, ...], ...]

  @classmethod
  def of(
    cls,
    names: Sequence[tuple[axes.AxisName, ...]],
    *lists: Sequence[Any],
  ) -> "Packing":
    """Returns a fast packing for leaves that are summed over axes.

    Args:
      names: for each leaf, the bound axes to sum over; an empty tuple for a
        leaf that stays separate.
      *lists: lists of arrays with the same packing, and with equal shapes at
        each position. Elements that are not arrays in the first list stay
        separate.
    """
    buckets: dict[Any, list[int]] = {}
    for i, (over, *xs) in enumerate(zip(names, *lists, strict=True)):
      # A buffer has one type, so only leaves of equal types share one.
      kind: Any = i
      if all(is_small(x, over) for x in xs):
        kind = (over, *((x.dtype, axes.varying_axes(x)) for x in xs))
      buckets.setdefault((kind,), []).append(i)
    shapes = tuple(getattr(x, "shape", ()) for x in lists[0])
    found: list[list[int]] = []
    for members in buckets.values():
      together = members
      if len(members) > 1:
        together = fitting(members, lambda i: lists[0][i])
      joined = set(together)
      alone = [[i] for i in members if i not in joined]
      found += [b for b in (together, *alone) if b]
    return cls._of(found, shapes)

  @classmethod
  def side_by_side(cls, leaves: Sequence[Any]) -> "Packing":
    """Returns a packing with one buffer for all leaves."""
    return cls._of([[*range(len(leaves))]], tuple(x.shape for x in leaves))

  @classmethod
  def _of(cls, buckets: list[list[int]], shapes: tuple) -> "Packing":
    # Slices at constant offsets would be separate kernels to compile.
    starts = [_starts(shapes, b) if len(b) > 1 else [] for b in buckets]
    constants = iter(materialize.integers([x for b in starts for x in b]))
    return cls(
      tuple(map(tuple, buckets)),
      shapes,
      tuple(tuple(itertools.islice(constants, len(b))) for b in starts),
    )

  def pack(self, leaves: Sequence[Any]) -> list[Any]:
    """Returns the buffers, with separate leaves unchanged."""
    return [
      jnp.concatenate([jnp.ravel(leaves[i]) for i in members])
      if len(members) > 1
      else leaves[members[0]]
      for members in self.buckets
    ]

  def unpack(self, buffers: Sequence[Any]) -> list[Any]:
    """Returns the leaves of the buffers."""
    leaves: list[Any] = [None] * len(self.shapes)
    for members, starts, x in zip(
      self.buckets, self.starts, buffers, strict=True
    ):
      if len(members) == 1:
        leaves[members[0]] = x
      for i, start in zip(members, starts, strict=False):
        size = math.prod(self.shapes[i])
        flat = jax.lax.dynamic_slice(
          x, (start,), (size,), allow_negative_indices=False
        )
        leaves[i] = jnp.reshape(flat, self.shapes[i])
    return leaves

  def computed_once(self, buffers: Sequence[Any]) -> list[Any]:
    """Returns the buffers, so that none is recomputed for each of its leaves.

    Separate leaves are not touched: large arrays would be copied.
    """
    at = [i for i, members in enumerate(self.buckets) if len(members) > 1]
    if not at:
      return list(buffers)
    kept = materialize.materialize([buffers[i] for i in at])
    found = dict(zip(at, kept, strict=True))
    return [found.get(i, x) for i, x in enumerate(buffers)]

  def joined(
    self, buffers: Sequence[Any], leaves: Sequence[Any]
  ) -> list[Joined]:
    """Returns the positions of the leaves that share a buffer."""
    return [
      Joined(leaves[i], x, start)
      for members, x in zip(self.buckets, buffers, strict=True)
      if len(members) > 1
      for i, start in zip(members, _starts(self.shapes, members), strict=True)
    ]

  def get(self, buffers: Sequence[Any], leaf: int) -> Any:
    """Returns one leaf."""
    n, start = self._place(leaf)
    if len(self.buckets[n]) == 1:
      return buffers[n]
    shape = self.shapes[leaf]
    return jnp.reshape(buffers[n][start : start + math.prod(shape)], shape)

  def put(self, buffers: Sequence[Any], leaf: int, x: jax.Array) -> list[Any]:
    """Returns the buffers with another value for one leaf."""
    n, start = self._place(leaf)
    if len(self.buckets[n]) > 1:
      x = jax.lax.dynamic_update_slice(buffers[n], jnp.ravel(x), (start,))
    return [x if i == n else buffer for i, buffer in enumerate(buffers)]

  def _place(self, leaf: int) -> tuple[int, int]:
    for n, members in enumerate(self.buckets):
      if leaf in members:
        return n, _starts(self.shapes, members)[members.index(leaf)]
    raise IndexError(f"There is no leaf {leaf}.")


def _starts(
  shapes: Sequence[tuple[int, ...]], members: Sequence[int]
) -> list[int]:
  sizes = [math.prod(shapes[i]) for i in members]
  return [*itertools.accumulate(sizes[:-1], initial=0)]


def is_small(leaf: Any, over: tuple[axes.AxisName, ...]) -> bool:
  """Whether a leaf may share a buffer if leaves are summed over ``over``."""
  return _is_sized(leaf, over) and leaf.nbytes < _least_alone()


def is_large(leaf: Any, over: tuple[axes.AxisName, ...]) -> bool:
  """Whether a leaf is too large to share a buffer.

  If nothing shares a buffer, as on TPU, no leaf is.
  """
  return _is_sized(leaf, over) and leaf.nbytes >= _least_alone()


def all_small(leaves: Sequence[Any], over: tuple[axes.AxisName, ...]) -> bool:
  """Whether leaves are so small that to read them once more costs little.

  Args:
    leaves: arrays, or what else is in a tree.
    over: the axes that the replicas lie along.
  """
  return (
    all(is_small(x, over) and x.nbytes < _ALONE_WITHIN for x in leaves)
    and sum(x.nbytes for x in leaves) <= _READ_AGAIN
  )


def _is_sized(leaf: Any, over: tuple[axes.AxisName, ...]) -> bool:
  if not isinstance(leaf, jax.Array) or not over:
    return False
  if not axes.mesh_axes().issuperset(over) or not axes.is_fully_manual():
    return False
  return axes.platform() == "cpu"


def _least_alone() -> int:
  return _ALONE_BETWEEN if jax.process_count() > 1 else _ALONE_WITHIN


def fitting(members: Sequence[Any], array: Callable[[Any], Any]) -> list[Any]:
  """Returns those of several arrays that should share a buffer.

  Args:
    members: candidates for sharing one.
    array: returns the array, or its type, of a member.
  """
  if jax.process_count() > 1:
    return list(members)
  size = lambda member: array(member).size * array(member).dtype.itemsize
  members = sorted(members, key=size)
  ends = itertools.accumulate(map(size, members))
  return members[: sum(end <= _BUFFER_WITHIN for end in ends)]
