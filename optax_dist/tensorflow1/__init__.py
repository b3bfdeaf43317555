"""TensorFlow 1, event by event: accumulators, token queue, strict mode."""

from optax_dist.tensorflow1 import accumulator, events, sparse_accumulator
from optax_dist.tensorflow1.checkpoint import Restored, restore_checkpoint
from optax_dist.tensorflow1.strict import StrictState, strict_quorum

__all__ = [
  "Restored",
  "StrictState",
  "accumulator",
  "events",
  "restore_checkpoint",
  "sparse_accumulator",
  "strict_quorum",
]
