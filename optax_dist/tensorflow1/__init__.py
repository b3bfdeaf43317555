"""TensorFlow 1: its checkpoints."""

from optax_dist.tensorflow1.checkpoint import Restored, restore_checkpoint

__all__ = ["Restored", "restore_checkpoint"]
