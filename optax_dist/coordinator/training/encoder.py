"""Encodes a gradient as the bytes that are sent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from optax_dist.coordinator.aggregation import means
from optax_dist.coordinator.runtime import trees
from optax_dist.coordinator.runtime.driver import Driver
from optax_dist.coordinator.runtime.trees import Template
from optax_dist.coordinator.training.model import Model
from optax_dist.coordinator.training.samples import Samples


class Encoded(NamedTuple):
  """An encoded sum of gradients.

  Attributes:
    finite: whether all its numbers are finite; if not, it has no bytes.
    payload: its bytes, if it is sent inline.
    parts: its bytes otherwise.
    work: what the coordinator's policy must know of this sum.
  """

  finite: bool = True
  payload: bytes = b""
  parts: Sequence[memoryview] = ()
  work: bytes = b""


class Encoder:
  """Encodes the gradients of one model.

  Attributes:
    fit: makes trees like the parameters of gradients, or refuses them.
    is_sound: whether a state of the replica's own optimizer is still finite, as the
      first one was.
  """

  def __init__(
    self, model: Model, template: Template, samples: Samples, inline: bool
  ):
    """Prepares the encoder.

    Args:
      model: the model whose gradients are encoded.
      template: the structure, shapes and dtypes that gradients must have.
      samples: how gradients were summed.
      inline: whether gradients are sent in messages.
    """
    self._update, self.fit = model.update, template.fit
    # Only a finite state is kept: joining replicas get it, and so does the replica
    # itself after a local change that was not finite.
    self.is_sound = trees.soundness(model.parts.inner)
    # Gradients that arrive while a step is aggregated are all in the next step, so a
    # mean may have this many terms.
    numbers = model.strategy.quorum
    terms = max(numbers.replicas_to_aggregate, numbers.total_num_replicas)
    self._layout = model.layout.bounded(terms)
    self._is_summed = samples.sums is not None
    # Reused memory for gradients that are sent inline.
    self._memory: np.ndarray | None = None
    if inline:
      self._memory = np.empty(model.layout.nbytes, np.uint8)

  def split(self, total: Any) -> list[Any]:
    """The part of a gradient that this process holds, as a list of arrays."""
    return self._update.split(total)

  def encode(self, total: Any, work: bytes, driver: Driver) -> Encoded:
    """Encodes a sum.

    Args:
      total: the sum; None for a stale one, of which nothing is sent.
      work: the policy's part of the submission, if it does not depend on the sum.
      driver: allocates memory, and knows whether peers share it.
    """
    if total is None:
      return Encoded(work=work)
    if self._is_summed:
      summed = total.result()
      parts: Any = [array.data for array in summed.arrays]
      work = summed.work
    else:
      out, in_place = self._buffer(driver)
      leaves = self._update.split(total)
      parts = means.write(leaves, self._layout, out, in_place)
      if parts is None:
        return Encoded(False, work=work)
    if self._memory is not None:
      return Encoded(True, b"".join(parts), (), work)
    return Encoded(True, b"", parts, work)

  def _buffer(self, driver: Driver) -> tuple[np.ndarray, bool]:
    """Memory for the bytes, and whether large arrays are sent without a copy."""
    if self._memory is not None:
      return self._memory, False
    if driver.shares_memory:
      # All peers are on this host, and read the bytes in this memory.
      return np.frombuffer(driver.allocate(), np.uint8), False
    return np.empty(self._layout.nbytes, np.uint8), True
