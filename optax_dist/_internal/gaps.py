"""The distances of replicas from their common center, as they are sent.

Replicas with their own parameters exchange now and then, and send their distance from
a center that all of them know. Small leaves share one buffer with the count of
finite replicas. A replica that isn't finite sends zeros.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from optax_dist._internal import axes, collectives
from optax_dist._internal.leaves import are_finite
from optax_dist._internal.leaves.materialize import materialize
from optax_dist._internal.leaves.packing import Packing
from optax_dist._internal.leaves.precision import cast_like
from optax_dist._internal.replica_params import Replica


@dataclasses.dataclass(frozen=True)
class Gaps:
  """Which gaps, and other arrays, share a buffer.

  Attributes:
    me: the replica.
    packing: of the gaps and the other arrays, after one element that counts finite
      replicas if ``reject`` is set.
    number: how many gaps there are.
    reject: whether replicas that aren't finite are left out.
  """

  me: Replica
  packing: Packing
  number: int
  reject: bool

  @classmethod
  def of(
    cls,
    me: Replica,
    center: Sequence[jax.Array],
    reject: bool,
    others: Sequence[jax.Array] = (),
  ) -> "Gaps":
    """Returns the fastest layout for a center.

    Args:
      me: the replica.
      center: the arrays of the center.
      reject: whether replicas that aren't finite are left out.
      others: further arrays to average with the gaps.
    """
    names = me.of.names
    like = axes.cast_to_varying([*center, *others], names)
    packing = me.packing([*_room(names, reject), *like])
    return cls(me, packing, len(center), reject)

  def pack(
    self,
    points: Sequence[jax.Array],
    center: Sequence[jax.Array],
    others: Sequence[jax.Array] = (),
  ) -> tuple[list[jax.Array], jax.Array]:
    """Returns ``center - points``, and whether it is finite.

    Args:
      points: this replica's parameters.
      center: the center's.
      others: the further arrays.

    Returns:
      Buffers, of zeros where the gaps are not finite and ``reject`` is set; and
      a boolean scalar, the same on all shards of the replica's model: whether they
      are finite. It is True if ``reject`` isn't set.
    """
    gaps = [c - cast_like(x, c) for x, c in zip(points, center, strict=True)]
    # Of one type, so that they lie where the center does.
    names = self.me.of.names
    room = _room(names, self.reject)
    arrays = axes.cast_to_varying([*room, *gaps, *others], names)
    buffers = self.packing.pack(arrays)
    if not self.reject:
      return buffers, jnp.asarray(True)
    # The other arrays are not checked.
    checked = self.me.packing(gaps).pack(gaps) if others and gaps else buffers
    numbers = are_finite.of_one_type([are_finite.number(x) for x in checked])
    finite = self.me.agree(are_finite.are_all(numbers), gaps)
    if len(numbers) > 1:
      finite = materialize(finite)
    return [jnp.where(finite, x, jnp.zeros_like(x)) for x in buffers], finite

  def sum(self, buffers: Sequence[jax.Array]) -> list[jax.Array]:
    """Adds buffers up over the replicas."""
    return collectives.sum_leaves(buffers, [self.me.of.names] * len(buffers))

  def mean(self, buffers: Sequence[jax.Array]) -> list[jax.Array]:
    """Averages buffers over the replicas that are finite; 0 where none is."""
    sums = self.sum(buffers)
    if not self.reject:
      return [x / jnp.asarray(self.me.size, x.dtype) for x in sums]
    count = jnp.maximum(self.packing.get(sums, 0), 1)
    return [x / count.astype(x.dtype) for x in sums]

  def unpack(
    self, buffers: Sequence[jax.Array]
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the gaps that are in buffers, and the others."""
    arrays = self.packing.unpack(buffers)[int(self.reject) :]
    return arrays[: self.number], arrays[self.number :]


def _room(names: tuple[axes.AxisName, ...], reject: bool) -> list[Any]:
  """Returns the element that counts a finite replica, if any may be left out."""
  return [axes.cast_to_varying(jnp.ones([], jnp.float32), names)] * reject
