"""Cross-shard, sync-replicas and elastic-averaging optimizers for optax.

This package has the transforms to chain, and functions that read their state.
The rest is in its modules: ``compression``, ``coordinator``, ``ledger``,
``optimizers``, ``quorum``, ``simulate``, ``sparse``, ``states`` and ``tensorflow1``.
"""

from typing import TYPE_CHECKING

from optax_dist._internal import lazy

if TYPE_CHECKING:
  from optax_dist import (
    compression,
    coordinator,
    ledger,
    optimizers,
    quorum,
    simulate,
    sparse,
    states,
    tensorflow1,
    transforms,
  )
  from optax_dist._internal.axes import UnboundAxisError
  from optax_dist._internal.indexed_slices import IndexedSlices, apply_updates
  from optax_dist._internal.placement.replica_blocks import PerReplica
  from optax_dist.states.averages import averaged_params
  from optax_dist.states.center import center_params
  from optax_dist.states.local_params import local_params
  from optax_dist.states.report import sync_report
  from optax_dist.transforms.clip_by_global_norm import clip_by_global_norm
  from optax_dist.transforms.cross_shard import cross_shard
  from optax_dist.transforms.elastic_average import elastic_average
  from optax_dist.transforms.local_updates import local_updates
  from optax_dist.transforms.params_ema import params_ema
  from optax_dist.transforms.per_replica import per_replica
  from optax_dist.transforms.presets import (
    bmuf,
    diloco,
    local_sgd,
    slowmo,
    sparse_loco,
  )
  from optax_dist.transforms.sharded import sharded
  from optax_dist.transforms.streaming import streaming_updates
  from optax_dist.transforms.sync_replicas import sync_replicas
  from optax_dist.transforms.train_step import TrainStep, train_step
  from optax_dist.transforms.under_jit import under_jit
else:
  __getattr__, __dir__ = lazy.names(__name__)

__version__ = "0.1.0"

__all__ = [
  "IndexedSlices",
  "PerReplica",
  "TrainStep",
  "UnboundAxisError",
  "apply_updates",
  "averaged_params",
  "bmuf",
  "center_params",
  "clip_by_global_norm",
  "compression",
  "coordinator",
  "cross_shard",
  "diloco",
  "elastic_average",
  "ledger",
  "local_params",
  "local_sgd",
  "local_updates",
  "optimizers",
  "params_ema",
  "per_replica",
  "quorum",
  "sharded",
  "simulate",
  "slowmo",
  "sparse",
  "sparse_loco",
  "states",
  "streaming_updates",
  "sync_replicas",
  "sync_report",
  "tensorflow1",
  "train_step",
  "transforms",
  "under_jit",
]
