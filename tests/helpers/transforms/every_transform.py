"""Each transform that wraps an inner one, in one form for tests of all of them."""

import maps
import optax

import optax_dist


def _with_outer(transform):
  """A transform with a plain outer optimizer, unless another is given."""

  def make(inner, *args, outer=None, **kwargs):
    return transform(inner, outer or optax.sgd(1.0), *args, **kwargs)

  return make


#: By name: what makes it, and the arguments that it has beside the common ones.
_TRANSFORMS = {
  "sync_replicas": (
    optax_dist.sync_replicas,
    lambda n: {"total_num_replicas": n, "replicas_to_aggregate": n},
  ),
  "elastic_average": (
    optax_dist.elastic_average,
    lambda n: {"num_replicas": n, "communication_period": 2, "rho": 0.1},
  ),
  "local_updates": (
    _with_outer(optax_dist.local_updates),
    lambda n: {"num_replicas": n, "communication_period": 2},
  ),
  "streaming_updates": (
    _with_outer(optax_dist.streaming_updates),
    lambda n: {"num_replicas": n, "communication_period": 2, "fragments": 1},
  ),
  "sharded": (optax_dist.sharded, lambda n: {"num_replicas": n}),
}
NAMES = tuple(_TRANSFORMS)
#: Those that have an outer optimizer.
OUTER = ("local_updates", "streaming_updates")


def make(name, inner, num_replicas, **kwargs):
  """Returns one of ``NAMES`` around ``inner``, over the axis of the maps."""
  transform, arguments = _TRANSFORMS[name]
  return transform(inner, maps.AXIS, **arguments(num_replicas) | kwargs)
