"""What a commit does: sync replicas, elastic averaging, local updates, DiLoCo."""

from optax_dist.coordinator.strategies.decoupled_diloco import (
  DecoupledDiloco,
  FragmentsState,
  decoupled_diloco,
)
from optax_dist.coordinator.strategies.elastic_average import (
  ElasticAverage,
  elastic_average,
)
from optax_dist.coordinator.strategies.local_updates import (
  LocalUpdates,
  local_updates,
)
from optax_dist.coordinator.strategies.strategy import (
  Exact,
  Factory,
  Quorum,
  SharedState,
  Strategy,
)
from optax_dist.coordinator.strategies.sync_replicas import SyncReplicas

__all__ = [
  "DecoupledDiloco",
  "ElasticAverage",
  "Exact",
  "Factory",
  "FragmentsState",
  "LocalUpdates",
  "Quorum",
  "SharedState",
  "Strategy",
  "SyncReplicas",
  "decoupled_diloco",
  "elastic_average",
  "local_updates",
]
