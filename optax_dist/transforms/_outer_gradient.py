"""The outer gradient of local updates: the replicas' mean change in a round.

DiLoCo's Algorithm 1 averages it as it is, see :mod:`.local_updates`. Here is what each
way to average provides, and the one that compresses what is sent.
"""

import dataclasses
from typing import Any, NamedTuple, Protocol

import jax

from optax_dist._internal import replica_params
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
  """

  mean: list[jax.Array]
  finite: jax.Array
  method: CompressionState


class OuterGradient(Protocol):
  """A way to average the replicas' changes, with one message per dtype."""

  def init(self, center: Any) -> CompressionState:
    """Returns what is kept from round to round, for such parameters."""

  def average(
    self,
    me: Replica,
    leaves: Leaves,
    center: Any,
    points: list[jax.Array],
    method: CompressionState,
  ) -> Change:
    """Averages the changes over the replicas.

    Args:
      me: the replica.
      leaves: the parameters that take part.
      center: the common start of all parameters.
      points: the replica's parameters that take part.
      method: what was kept from the last round.
    """


@dataclasses.dataclass(frozen=True)
class CompressedMean(OuterGradient):
  """The mean in fewer bytes; a replica that isn't finite has not moved.

  Attributes:
    compression: the method.
    reject_nonfinite: whether replicas that aren't finite are left out.
    mix: see :func:`optax_dist.streaming_updates`.
  """

  compression: Compression
  reject_nonfinite: bool
  mix: float

  def init(self, center: Any) -> CompressionState:
    return self.compression.init(replica_params.unmoved(center))

  def average(
    self,
    me: Replica,
    leaves: Leaves,
    center: Any,
    points: list[jax.Array],
    method: CompressionState,
  ) -> Change:
    centers = leaves.of(center)
    points, finite = me.where_finite(points, centers, self.reject_nonfinite)
    # In a tree of all parameters, so that the state's structure never changes.
    gap = leaves.put(
      replica_params.unmoved(center),
      [c - x for x, c in zip(points, centers, strict=True)],
    )
    mean, new = aggregate(self.compression, gap, method, me.of.names)
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
    return Change(leaves.of(mean), finite, new)
