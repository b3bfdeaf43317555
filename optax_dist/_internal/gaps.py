"""The distances of replicas from their common center, as they are sent.

Replicas with their own parameters exchange now and then, and send their distance from
a center that all of them know. Small leaves share one buffer with the count of
finite replicas. A replica that isn't finite sends zeros.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_dist._internal import axes, collectives
from optax_dist._internal.leaves import are_finite
from optax_dist._internal.leaves.materialize import materialize
from optax_dist._internal.leaves.packing import Packing
from optax_dist._internal.leaves.precision import cast_like
from optax_dist._internal.replica_params import Replica


class Packed(NamedTuple):
  """Gaps, before they are sent.

  Attributes:
    buffers: these and other arrays.
    checked: the gaps alone, to check whether they are finite; None if the buffers
      have nothing else.
  """

  buffers: list[jax.Array]
  checked: list[jax.Array] | None


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
  ) -> Packed:
    """Returns ``center - points`` and the other arrays in buffers.

    Args:
      points: this replica's parameters.
      center: the center's.
      others: the further arrays.
    """
    gaps = [c - cast_like(x, c) for x, c in zip(points, center, strict=True)]
    # Of one type, so that they lie where the center does.
    names = self.me.of.names
    room = _room(names, self.reject)
    arrays = axes.cast_to_varying([*room, *gaps, *others], names)
    buffers = self.packing.pack(arrays)
    # The other arrays are not checked.
    own = self.reject and others and gaps
    return Packed(buffers, self.me.packing(gaps).pack(gaps) if own else None)

  def sum(self, buffers: Sequence[jax.Array]) -> list[jax.Array]:
    """Adds buffers up over the replicas."""
    return collectives.sum_leaves(buffers, [self.me.of.names] * len(buffers))

  def mean(self, packed: Packed) -> tuple[list[jax.Array], jax.Array]:
    """Averages buffers over the replicas that are finite; 0 where none is.

    Returns:
      The means, and a boolean scalar, the same on all shards of the replica's
      model: whether its gaps are finite. It is True if ``reject`` isn't set.
    """
    buffers, checked = packed
    if not self.reject:
      size = self.me.size
      sums = self.sum(buffers)
      return [x / jnp.asarray(size, x.dtype) for x in sums], jnp.asarray(True)
    checked = buffers if checked is None else checked
    numbers = are_finite.of_one_type([are_finite.number(x) for x in checked])
    finite = self.me.agree(are_finite.are_all(numbers), checked)
    if len(numbers) > 1:
      finite = materialize(finite)
    sums = self.sum([jnp.where(finite, x, jnp.zeros_like(x)) for x in buffers])
    count = jnp.maximum(self.packing.get(sums, 0), 1)
    return [x / count.astype(x.dtype) for x in sums], finite

  def unpack(
    self, buffers: Sequence[jax.Array], others: Sequence[jax.Array] = ()
  ) -> tuple[list[jax.Array], list[jax.Array]]:
    """Returns the mean gaps that are in buffers, and the means of the others.

    If no replica is finite, there is no mean of the others: they stay this
    replica's own, with 0 for what is not finite.

    Args:
      buffers: the means from :meth:`mean`.
      others: this replica's own further arrays, as given to :meth:`pack`.
    """
    arrays = self.packing.unpack(buffers)[int(self.reject) :]
    gaps, means = arrays[: self.number], arrays[self.number :]
    if not (self.reject and others):
      return gaps, means
    # The mean of the ones that count finite replicas.
    any_finite = self.packing.get(buffers, 0) > 0
    return gaps, [
      jnp.where(any_finite, mean, jnp.where(jnp.isfinite(x), x, 0))
      for mean, x in zip(means, others, strict=True)
    ]


def _room(names: tuple[axes.AxisName, ...], reject: bool) -> list[Any]:
  """Returns the element that counts a finite replica, if any may be left out."""
  return [axes.cast_to_varying(jnp.ones([], jnp.float32), names)] * reject
