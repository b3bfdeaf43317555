"""Strategies of a commit: sync replicas, elastic averaging, local updates."""

from optax_dist.coordinator.strategies.elastic_average import elastic_average
from optax_dist.coordinator.strategies.local_steps import LocalSteps
from optax_dist.coordinator.strategies.local_updates import local_updates
from optax_dist.coordinator.strategies.strategy import (
  Factory,
  Quorum,
  SharedState,
  Strategy,
  WaitingStrategy,
)
from optax_dist.coordinator.strategies.sync_replicas import SyncReplicas

__all__ = [
  "Factory",
  "LocalSteps",
  "Quorum",
  "SharedState",
  "Strategy",
  "SyncReplicas",
  "WaitingStrategy",
  "elastic_average",
  "local_updates",
]
