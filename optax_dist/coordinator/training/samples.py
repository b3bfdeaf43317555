"""A replica's leased samples, and how their gradients are added up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from optax_dist import ledger
from optax_dist.coordinator.aggregation import nodes
from optax_dist.coordinator.data import arguments, micro_batches
from optax_dist.coordinator.data import probe as probes
from optax_dist.coordinator.runtime.processes import Processes
from optax_dist.coordinator.runtime.trees import Template
from optax_dist.coordinator.training.model import Model


class Samples:
  """How a replica gets samples, if samples are leased, and sums gradients.

  Attributes:
    data: the samples that are leased; None if none are.
    slots: the micro-batches of deterministic data; None without such data.
    sums: adds up their gradients; None without such data.
    add: adds two gradients.
    each: samples of one gradient, or local step; 0 if none are leased.
    window: samples of a step whose samples are fixed; otherwise 0.
  """

  def __init__(
    self,
    data: ledger.Batches | None,
    model: Model,
    processes: Processes,
    allocate: Callable[[], memoryview],
  ):
    """Prepares the sums.

    Args:
      data: the samples that are leased; None if none are.
      model: the model that is trained on them.
      processes: the processes of the replica.
      allocate: memory for one gradient.

    Raises:
      ValueError: a step does not have as many samples for each gradient.
    """
    self.data = data
    self.each = arguments.samples_per_gradient(data, model.strategy)
    self.slots: micro_batches.Slots | None = None
    self.sums: micro_batches.Sums | None = None
    self.add: Callable[[Any, Any], Any]
    self.add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))
    self.window = 0
    if data is not None and data.deterministic:
      self.slots = micro_batches.Slots(data)
      summing = nodes.Summing(model.layout, data.slots, allocate)
      self.sums = micro_batches.Sums(self.slots, summing, processes)
      self.add, self.window = self.sums.add, data.global_batch

  def needed_for(self, what: str) -> ledger.Batches:
    """The data.

    Raises:
      ValueError: the run has no data.
    """
    if self.data is None:
      raise ValueError(
        f"{what} needs data=Batches(...), given to join or run_embedded."
      )
    return self.data

  def probed(
    self, probe: probes.Probe | None, model: Model, template: Template
  ) -> tuple[tuple[str, str], ...]:
    """A probe's result, on which replicas must agree; () without slots."""
    if self.slots is None:
      return ()
    if probe is None:
      return (("gradient of a probe", ""),)
    slots, strategy = self.slots, model.strategy
    first = ((0, slots.data.unit(slots.data.slots)),)

    def update(start: Any, grads: Any) -> Any:
      leaves = jax.tree.leaves(template.fit(grads))
      arrays = [np.asarray(leaf) for leaf in leaves]
      return model.update.apply(strategy.shared(start), arrays)

    start = strategy.params(model.shared, strategy.local(model.shared))
    result = probes.result(probe, start, slots(first), update)
    return (("gradient of a probe", result),)

  def close(self) -> None:
    """Stops the thread that adds up gradients."""
    if self.sums is not None:
      self.sums.close()
