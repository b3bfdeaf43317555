"""The outer gradient of local updates: the replicas' mean change in a round.

DiLoCo's Algorithm 1 averages it as it is; others compress what is sent. Both have
the same interface here.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from optax_dist._internal import axes, replica_params
from optax_dist._internal.leaves.precision import cast_like
from optax_dist._internal.replica_params import Leaves, Replica
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


class Round(NamedTuple):
  """What a replica has at the end of a round.

  Attributes:
    me: the replica.
    leaves: the parameters that take part.
    center: the common start of all parameters.
    points: the replica's parameters that take part.
    method: the state of a compression.
    others: further arrays to average.
  """

  me: Replica
  leaves: Leaves
  center: Any
  points: Sequence[jax.Array]
  method: CompressionState
  others: Sequence[jax.Array] = ()


class OuterGradient(Protocol):
  """A way to average the replicas' changes."""

  def init(self, center: Any) -> CompressionState:
    """Returns the state of a compression, for such parameters."""

  def average(self, end: Round) -> Change:
    """Averages the changes over the replicas, with one message per dtype."""


def outer_gradient(
  compression: Compression | None, reject_nonfinite: bool, mix: float = 0.0
) -> OuterGradient:
  """Returns the way to average changes.

  Args:
    compression: a compression method, or None for none.
    reject_nonfinite: whether replicas that aren't finite are left out.
    mix: see :func:`optax_dist.streaming_updates`.
  """
  if compression is None:
    return Mean(reject_nonfinite)
  return CompressedMean(compression, reject_nonfinite, mix)


@dataclasses.dataclass(frozen=True)
class Mean:
  """The mean over the replicas that are finite; 0 where none is."""

  reject_nonfinite: bool

  def init(self, center: Any) -> CompressionState:
    """Returns an empty state: nothing is left to send."""
    del center
    return CompressionState(None, None, jnp.zeros([], jnp.int32))

  def average(self, end: Round) -> Change:
    """See :class:`OuterGradient`.

    If no replica is finite, there is no mean of the others: they stay this
    replica's own, with 0 for what is not finite.
    """
    me, others = end.me, end.others
    centers = end.leaves.of(end.center)
    gaps = [
      c - cast_like(x, c) for x, c in zip(end.points, centers, strict=True)
    ]
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
    return Change(means, finite, end.method, means_of_others)


@dataclasses.dataclass(frozen=True)
class CompressedMean:
  """The mean in fewer bytes; a replica that isn't finite has not moved.

  Attributes:
    compression: the method.
    reject_nonfinite: whether replicas that aren't finite are left out.
    mix: the share of what was not sent that stays in a replica's parameters.
  """

  compression: Compression
  reject_nonfinite: bool
  mix: float

  def init(self, center: Any) -> CompressionState:
    """Returns the state of the method."""
    return self.compression.init(replica_params.unmoved(center))

  def average(self, end: Round) -> Change:
    """See :class:`OuterGradient`; there are no others."""
    leaves, method = end.leaves, end.method
    centers = leaves.of(end.center)
    points, finite = end.me.where_finite(
      list(end.points), centers, self.reject_nonfinite
    )
    # In a tree of all parameters, so that the state's structure never changes.
    gap = leaves.put(
      replica_params.unmoved(end.center),
      [c - x for x, c in zip(points, centers, strict=True)],
    )
    mean, new = aggregate(self.compression, gap, method, end.me.of.names)
    decay = self.compression.error_feedback
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
