"""Describes a replica's job, for its coordinator and for comparison with others."""

from __future__ import annotations

import os
from typing import Any

from optax_dist import ledger
from optax_dist.coordinator import journal, options
from optax_dist.coordinator.data import probe as probes
from optax_dist.coordinator.protocol import entries
from optax_dist.coordinator.training.model import Model


def is_inline(model: Model, settings: options.Options) -> bool:
  """Whether gradients are sent in messages.

  Shards are exchanged between members even if they are small, since no process has the
  whole gradient.
  """
  is_whole = model.parts.gradient is None
  return is_whole and model.layout.nbytes <= settings.inline_bytes


def job(
  model: Model,
  settings: options.Options,
  data: ledger.Batches | None,
  alike: tuple[tuple[str, str], ...],
) -> entries.Job:
  """Describes the job.

  Args:
    model: what is trained.
    settings: the options of the run.
    data: the samples that are leased; None if none are.
    alike: what replicas must agree on, as pairs of a name and a text.
  """
  inline, nbytes = is_inline(model, settings), model.layout.nbytes
  strategy, numbers = model.strategy, model.strategy.quorum
  return entries.Job(
    alike + model.parts.agreement,
    entries.Rules(
      **numbers._asdict(),
      inline_bytes=nbytes if inline else None,
      alone=strategy.alone,
      timeout=float(settings.timeout),
      transfer_timeout=settings.transfer_timeout,
      silence_timeout=settings.silence_timeout,
      stall_warning=float(settings.stall_warning),
      fingerprint_every=settings.fingerprint_every,
      max_skipped=settings.max_skipped,
    ),
    leaves=tuple((tuple(x.shape), str(x.dtype)) for x in model.update.blocks)
    if inline
    else (),
    wire=settings.wire,
    data=data,
    fragments=strategy.fragments,
    about=journal.to_json("the run", _about(model, settings, data, inline)),
    journal="" if settings.journal is None else os.fspath(settings.journal),
    run=settings.run,
  )


def _about(
  model: Model,
  settings: options.Options,
  data: ledger.Batches | None,
  inline: bool,
) -> dict[str, Any]:
  """The fields of the run's first line in the journal."""
  numbers = model.strategy.quorum
  return {
    "strategy": model.strategy.name,
    **numbers._asdict(),
    "cores": probes.cores(),
    "weight": numbers.weight and "inverse_staleness",
    "wire": settings.wire,
    "inline": inline,
    "gradient_bytes": model.layout.nbytes,
    "data": None if data is None else vars(data),
    "config": dict(settings.config),
  }
