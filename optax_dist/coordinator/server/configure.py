"""What follows from a job: the rules, and the mean of inline gradients."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.entries import Job, Part

if TYPE_CHECKING:
  import numpy as np

  from optax_dist.coordinator.aggregation import reducer

_DILOCO = "optax_dist.coordinator.extras.decoupled_diloco"


class _Leaf(NamedTuple):
  shape: tuple[int, ...]
  dtype: np.dtype


def config_of(job: Job) -> Config:
  """The configuration of a coordinator."""
  policy = None
  if job.fragments is not None:
    # Optional: few runs need it.
    rounds = importlib.import_module(f"{_DILOCO}.rounds")
    policy = rounds.MakeRounds(job.fragments)
  if job.rules.inline_bytes is None:
    return Config(job, None, policy)

  # With the first gradients: members wait for the answer of one that starts, and
  # NumPy takes half of the time until then.
  @functools.cache
  def averages() -> reducer.Reducer:
    import numpy as np

    from optax_dist.coordinator.aggregation import layout, reducer

    leaves = [_Leaf(shape, np.dtype(name)) for shape, name in job.leaves]
    deterministic = job.data is not None and job.data.deterministic
    return reducer.Reducer(
      layout.layout(leaves, job.wire), job.data if deterministic else None
    )

  def average(parts: Sequence[Part], gradients: Sequence[bytes]) -> bytes:
    return averages().whole(parts, gradients)

  return Config(job, average, policy)
