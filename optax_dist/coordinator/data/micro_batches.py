"""The micro-batches of deterministic data, as a training loop gets them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from optax_dist import ledger
from optax_dist.ledger import Spans, tree


class Slot(NamedTuple):
  """A micro-batch: its samples and its key follow from step and number alone.

  Attributes:
    step: the step that it belongs to, counted from the first sample of the data.
    number: its number in the step, from 0.
    indices: int64 indices of its samples.
    key: the key of its random numbers, for dropout and the like: a scalar key,
      `fold_in(fold_in(key(data.seed), step), number)`.
  """

  step: int
  number: int
  indices: np.ndarray
  key: jax.Array


class Slots:
  """Makes the slots of positions.

  Attributes:
    data: the deterministic data.

  Example:
    >>> data = ledger.Batches(8, 4, micro_batch=2, deterministic=True)
    >>> slot = Slots(data, data.indices)(((6, 8),))
    >>> slot.step, slot.number, slot.indices.shape
    (1, 1, (2,))
  """

  def __init__(
    self, data: ledger.Batches, indices: Callable[[Spans], np.ndarray]
  ):
    """Sets the data, and what finds the indices of its positions."""
    self.data, self._indices = data, indices
    seed = data.seed

    def key(step: int, number: int) -> jax.Array:
      first = jax.random.fold_in(jax.random.key(seed), step)
      return jax.random.fold_in(first, number)

    self._key = jax.jit(key)

  def number(self, spans: Spans) -> int:
    """The number of the micro-batch at these positions."""
    ((number, _),) = tree.slots(self.data, spans)
    return number

  def __call__(self, spans: Spans) -> Slot:
    """The micro-batch at these positions."""
    step, number = spans[0][0] // self.data.global_batch, self.number(spans)
    key = self._key(step, number)
    return Slot(step, number, self._indices(spans), key)
