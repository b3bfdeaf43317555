"""Cross-shard, sync-replicas and elastic-averaging optimizers for optax."""
