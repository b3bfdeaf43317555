"""TensorFlow's sync replicas as values: accumulators, token queue, system."""

from tests.tensorflow1.events.accumulators import (
  Accumulator,
  SparseAccumulator,
)
from tests.tensorflow1.events.outcomes import (
  Advanced,
  Applied,
  Completed,
  GotToken,
  Outcome,
  StepFailed,
  Taken,
)
from tests.tensorflow1.events.sums import DenseSum, SparseSum
from tests.tensorflow1.events.system import (
  Observation,
  SyncReplicas,
  Worker,
  sync_replicas,
)
from tests.tensorflow1.events.token_queue import TokenQueue

__all__ = [
  "Accumulator",
  "Advanced",
  "Applied",
  "Completed",
  "DenseSum",
  "GotToken",
  "Observation",
  "Outcome",
  "SparseAccumulator",
  "SparseSum",
  "StepFailed",
  "SyncReplicas",
  "Taken",
  "TokenQueue",
  "Worker",
  "sync_replicas",
]
