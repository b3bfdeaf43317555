"""A run's configuration from its job: the policy, and the mean of inline gradients."""

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
  nbytes = job.rules.inline_bytes
  if nbytes is None:
    return Config(job, policy=policy)

  # NumPy is imported with the first gradients: members wait for the coordinator's first
  # answer, and the import would double the time until then.
  @functools.cache
  def averages() -> reducer.Reducer:
    import numpy as np

    from optax_dist.coordinator.aggregation import layout, reducer

    leaves = [_Leaf(shape, np.dtype(name)) for shape, name in job.leaves]
    deterministic = job.data is not None and job.data.deterministic
    made = layout.layout(leaves, job.wire)
    if not made.nbytes == nbytes > 0:
      raise ValueError(
        f"its arrays have {made.nbytes} bytes, and inline_bytes is {nbytes}"
      )
    return reducer.Reducer(made, job.data if deterministic else None)

  def average(parts: Sequence[Part], gradients: Sequence[bytes]) -> bytes:
    return averages().whole(parts, gradients)

  def check() -> None:
    try:
      averages()
    except (TypeError, KeyError, OverflowError) as error:
      raise ValueError(f"its arrays are none: {error}") from None

  return Config(job, average, policy, check)
