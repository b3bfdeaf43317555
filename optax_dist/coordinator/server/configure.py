"""What follows from a job: the rules, and the mean of inline gradients."""

from __future__ import annotations

import importlib
from typing import NamedTuple

import numpy as np

from optax_dist.coordinator.aggregation import layout, reducer
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.entries import Job

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
    rules = importlib.import_module(f"{_DILOCO}.rules")

    fragments = job.fragments
    policy = rounds.MakeRounds(
      rules.Config(
        fragments.fragments,
        fragments.period,
        fragments.overlap,
        fragments.safety,
        fragments.max_staleness,
      )
    )
  if job.rules.inline_bytes is None:
    return Config(job, None, policy)
  leaves = [_Leaf(shape, np.dtype(name)) for shape, name in job.leaves]
  deterministic = job.data is not None and job.data.deterministic
  averages = reducer.Reducer(
    layout.layout(leaves, job.wire), job.data if deterministic else None
  )
  return Config(job, averages.whole, policy)
