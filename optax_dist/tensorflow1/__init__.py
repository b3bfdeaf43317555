"""What repeats TensorFlow 1 event by event: accumulators, token queue, strict mode."""

from optax_dist.tensorflow1 import accumulator, events, sparse_accumulator
from optax_dist.tensorflow1.strict import StrictState, strict_quorum

__all__ = [
  "StrictState",
  "accumulator",
  "events",
  "sparse_accumulator",
  "strict_quorum",
]
