"""TensorFlow 1, event by event: accumulators, token queue, sync replicas."""

from optax_dist.tensorflow1 import accumulator, events, sparse_accumulator
from optax_dist.tensorflow1.checkpoint import Restored, restore_checkpoint

__all__ = [
  "Restored",
  "accumulator",
  "events",
  "restore_checkpoint",
  "sparse_accumulator",
]
