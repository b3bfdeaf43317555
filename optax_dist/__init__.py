"""Cross-shard, sync-replicas and elastic-averaging optimizers for optax."""

from optax_dist.axes import UnboundAxisError
from optax_dist.cross_shard import cross_shard
from optax_dist.local_params import local_params

__version__ = "0.1.0"

__all__ = [
  "UnboundAxisError",
  "cross_shard",
  "local_params",
]
