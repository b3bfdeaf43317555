"""TensorFlow 1: its checkpoints, and its accumulators of gradients."""

from optax_dist.tensorflow1 import accumulator, sparse_accumulator
from optax_dist.tensorflow1.checkpoint import Restored, restore_checkpoint

__all__ = [
  "Restored",
  "accumulator",
  "restore_checkpoint",
  "sparse_accumulator",
]
