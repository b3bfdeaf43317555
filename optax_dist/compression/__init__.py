"""Gradient compression: replicas aggregate in fewer bytes.

Each method is a :class:`Compression` for the ``compression=`` of a transform.
"""

from optax_dist.compression.interface import Compression, CompressionState
from optax_dist.compression.power_sgd import power_sgd
from optax_dist.compression.quantize import quantize
from optax_dist.compression.sign import sign
from optax_dist.compression.top_k import top_k
from optax_dist.compression.transform import (
  CompressedReplica,
  CompressedState,
)

__all__ = [
  "CompressedReplica",
  "CompressedState",
  "Compression",
  "CompressionState",
  "power_sgd",
  "quantize",
  "sign",
  "top_k",
]
