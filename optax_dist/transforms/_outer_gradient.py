"""The mean over the replicas of how far they moved, as it is or compressed.

It is what local updates communicate: the outer gradient of DiLoCo's Algorithm 1, which
:mod:`.local_updates` and :mod:`.streaming` compute.
"""

import dataclasses
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from optax_dist._internal import axes, replica_params
from optax_dist._internal.replica_params import Leaves
from optax_dist._internal.replicas import Replica
from optax_dist.compression.interface import (
  Compression,
  CompressionState,
  aggregate,
  check_compression,
)


class MeanOverReplicas(Protocol):
  """A way to average what the replicas have, with one message per dtype."""

  def init(self, center: Any) -> CompressionState:
    """Returns what is kept from round to round, for such parameters."""

  def of(
    self,
    me: Replica,
    leaves: Leaves,
    center: Any,
    gaps: list[jax.Array],
    finite: jax.Array,
    method: CompressionState,
  ) -> tuple[list[jax.Array], CompressionState]:
    """Returns the mean over the replicas, and what to keep for the next round.

    Args:
      me: the replica.
      leaves: the parameters that take part.
      center: the common start of all parameters.
      gaps: how far each parameter that takes part moved on this replica; zeros if
        it is not finite.
      finite: whether it is (boolean scalar).
      method: what was kept from the last round.
    """


def mean_over_replicas(
  user: str, compression: Compression | None, mix: float = 0.0
) -> MeanOverReplicas:
  """Returns the way to average.

  Args:
    user: the transform that needs it, for messages.
    compression: a compression method; None for the mean as it is.
    mix: see :func:`optax_dist.streaming_updates`.

  Raises:
    TypeError: if ``compression`` is not a compression method.
  """
  if compression is None:
    return _Mean()
  check_compression(user, compression)
  return _CompressedMean(compression, mix)


class _Mean(MeanOverReplicas):
  """The mean over the replicas that are finite; 0 where none is."""

  def init(self, center: Any) -> CompressionState:
    del center
    return CompressionState(None, None, jnp.zeros([], jnp.int32))

  def of(
    self,
    me: Replica,
    leaves: Leaves,
    center: Any,
    gaps: list[jax.Array],
    finite: jax.Array,
    method: CompressionState,
  ) -> tuple[list[jax.Array], CompressionState]:
    del leaves, center
    sent = [finite.astype(jnp.float32), *gaps]
    count, *sums = me.sum(axes.cast_to_varying(sent, me.of.names))
    divisor = jnp.maximum(count, 1)
    return [x / divisor.astype(x.dtype) for x in sums], method


@dataclasses.dataclass(frozen=True)
class _CompressedMean(MeanOverReplicas):
  """The mean in fewer bytes; a replica that isn't finite has not moved.

  Attributes:
    compression: the method.
    mix: see :func:`optax_dist.streaming_updates`.
  """

  compression: Compression
  mix: float

  def init(self, center: Any) -> CompressionState:
    return self.compression.init(replica_params.unmoved(center))

  def of(
    self,
    me: Replica,
    leaves: Leaves,
    center: Any,
    gaps: list[jax.Array],
    finite: jax.Array,
    method: CompressionState,
  ) -> tuple[list[jax.Array], CompressionState]:
    del finite
    # In a tree of all parameters, so that the state's structure never changes.
    tree = leaves.put(replica_params.unmoved(center), gaps)
    mean, new = aggregate(self.compression, tree, method, me.of.names)
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
    return leaves.of(mean), new
