"""A store on an etcd cluster: `etcd://a:2379,b:2379` and `etcds://...`."""

from __future__ import annotations

from optax_dist.coordinator.extras.etcd import parsing
from optax_dist.coordinator.store import urls

urls.register("etcd", parsing.parse)
urls.register("etcds", parsing.parse)
