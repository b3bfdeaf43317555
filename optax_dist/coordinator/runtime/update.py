"""The update of a step: splits a gradient to send it, and applies a mean.

    gradient  -> split            ->  this process's arrays, to be encoded
    mean      -> apply(shared, .) ->  the shared state of the next step

A process of a multi-process replica has shards of gradients and of the state; the
update runs on whole arrays, over the devices of all processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from optax_dist.coordinator import strategies
from optax_dist.coordinator.runtime import processes, trees


class Update:
  """The update by a strategy, for one process.

  Attributes:
    blocks: shapes and dtypes of the arrays of a gradient that are sent.
  """

  def __init__(
    self, strategy: strategies.Strategy, params: Any, parts: processes.Parts
  ):
    """Prepares the update.

    Args:
      strategy: computes the update.
      params: the initial parameters.
      parts: this process's part of the arrays.
    """
    self._update = parts.apply
    self._shards = parts.gradient
    leaves, self._tree = jax.tree.flatten(strategy.exchanged(params))
    # The arrays themselves are not kept: they would live as long as this object.
    self.blocks = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves]
    if self._shards is not None:
      self.blocks = self._shards.templates

  def split(self, total: Any) -> list[Any]:
    """The part of a gradient that this process holds, as a list of arrays."""
    leaves: list[Any] = jax.tree_util.tree_leaves(total)
    if self._shards is None:
      return leaves
    return self._shards.split(leaves)

  def apply(self, shared: Any, leaves: Sequence[np.ndarray]) -> Any:
    """The shared state after a commit; called by the event loop's thread.

    Args:
      shared: the state before it.
      leaves: the leaves of the mean, or this process's shards of them.
    """
    arrays: Sequence[Any] = leaves
    if self._shards is not None:
      arrays = self._shards.join(leaves)
    mean = jax.tree_util.tree_unflatten(self._tree, arrays)
    try:
      return self._update(shared, mean)
    except (RuntimeError, ValueError) as error:
      trees.check_alive(shared, error)
      raise
