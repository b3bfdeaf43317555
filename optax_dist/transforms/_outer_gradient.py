"""The outer gradient of local updates: the replicas' mean change in a round.

DiLoCo's Algorithm 1 averages it as it is; others compress what is sent.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from optax_dist._internal import axes, replica_params
from optax_dist._internal.leaves.precision import cast_like
from optax_dist._internal.replica_params import Leaves
from optax_dist._internal.replicas import Replica
from optax_dist.compression.interface import (
  Compression,
  CompressionState,
  aggregate,
)


class Change(NamedTuple):
  """The replicas' mean change since their common start.

  Attributes:
    mean: ``start - parameters`` for each parameter that takes part.
    finite: whether this replica's parameters are finite (boolean scalar), and so
      take part; True if that isn't asked.
    method: the state of a compression.
    others: the means of the further arrays.
  """

  mean: list[jax.Array]
  finite: jax.Array
  method: CompressionState
  others: list[jax.Array]


@dataclasses.dataclass(frozen=True)
class OuterGradient:
  """A way to average the replicas' changes, with one message per dtype.

  Attributes:
    compression: a compression method; None for the mean as it is.
    reject_nonfinite: whether replicas that aren't finite are left out.
    mix: see :func:`optax_dist.streaming_updates`.
  """

  compression: Compression | None
  reject_nonfinite: bool
  mix: float = 0.0

  def init(self, center: Any) -> CompressionState:
    """Returns the state of the compression, for such parameters."""
    if self.compression is None:
      return CompressionState(None, None, jnp.zeros([], jnp.int32))
    return self.compression.init(replica_params.unmoved(center))

  def average(
    self,
    me: Replica,
    leaves: Leaves,
    center: Any,
    points: list[jax.Array],
    method: CompressionState,
    others: Sequence[jax.Array] = (),
  ) -> Change:
    """Averages the changes over the replicas.

    Args:
      me: the replica.
      leaves: the parameters that take part.
      center: the common start of all parameters.
      points: the replica's parameters that take part.
      method: the state of the compression.
      others: further arrays to average; none with a compression.
    """
    if self.compression is None:
      return self._mean(me, leaves.of(center), points, method, others)
    return self._compressed_mean(
      self.compression, me, leaves, center, points, method
    )

  def _mean(
    self,
    me: Replica,
    centers: list[jax.Array],
    points: list[jax.Array],
    method: CompressionState,
    others: Sequence[jax.Array],
  ) -> Change:
    """The mean over the replicas that are finite; 0 where none is.

    If no replica is finite, there is no mean of the others: they stay this
    replica's own, with 0 for what is not finite.
    """
    gaps = [c - cast_like(x, c) for x, c in zip(points, centers, strict=True)]
    finite = jnp.asarray(True)
    sent = axes.cast_to_varying([*gaps, *others], me.of.names)
    if self.reject_nonfinite:
      finite = me.all_finite(gaps)
      sent = [jnp.where(finite, x, jnp.zeros_like(x)) for x in sent]
    here = axes.cast_to_varying(finite.astype(jnp.float32), me.of.names)
    count, *sums = me.sum([here, *sent])
    if not self.reject_nonfinite:
      count = jnp.asarray(me.size)
    divisor = jnp.maximum(count, 1)
    means = [x / divisor.astype(x.dtype) for x in sums]
    means, means_of_others = means[: len(gaps)], means[len(gaps) :]
    if self.reject_nonfinite:
      means_of_others = [
        jnp.where(count > 0, mean, jnp.where(jnp.isfinite(x), x, 0))
        for mean, x in zip(means_of_others, others, strict=True)
      ]
    return Change(means, finite, method, means_of_others)

  def _compressed_mean(
    self,
    compression: Compression,
    me: Replica,
    leaves: Leaves,
    center: Any,
    points: list[jax.Array],
    method: CompressionState,
  ) -> Change:
    """The mean in fewer bytes; a replica that isn't finite has not moved."""
    centers = leaves.of(center)
    points, finite = me.where_finite(points, centers, self.reject_nonfinite)
    # In a tree of all parameters, so that the state's structure never changes.
    gap = leaves.put(
      replica_params.unmoved(center),
      [c - x for x, c in zip(points, centers, strict=True)],
    )
    mean, new = aggregate(compression, gap, method, me.of.names)
    decay = compression.error_feedback
    if self.mix and decay is not None:
      # This share of what the round left out stays in the replica's own
      # parameters, and is part of the next round's change.
      residual = jax.tree.map(
        lambda left, before: (1 - self.mix) * left + self.mix * decay * before,
        new.residual,
        method.residual,
      )
      new = new._replace(residual=residual)
    return Change(leaves.of(mean), finite, new, [])
