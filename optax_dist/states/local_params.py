"""Parameters that each replica differentiates for itself."""

import optax

from optax_dist._internal import axes


def local_params(
  params: optax.Params, axis_name: axes.AxisNames
) -> optax.Params:
  """Casts replicated parameters so that each replica gets its own gradient.

  Under ``jax.shard_map`` with ``check_vma=True`` (the default) ``jax.grad`` with
  respect to replicated parameters returns the gradient *summed over all
  replicas*. A replica's own gradient is needed to clip or to drop it before
  aggregation, and by :func:`optax_dist.sync_replicas` and all else that
  aggregates by itself::

    grads = jax.grad(loss)(optax_dist.local_params(params, "data"), batch)

  In every other map the gradient is the replica's own anyway, and the
  parameters come back unchanged. Values never change and no data moves.

  Args:
    params: a pytree of arrays.
    axis_name: the mesh axis, or a sequence of axes, that the replicas lie along.

  Returns:
    The same parameters, in type varying over ``axis_name`` where JAX tracks it.

  Raises:
    UnboundAxisError: if an axis is not bound here.

  Example:
    >>> import jax, jax.numpy as jnp, optax_dist
    >>> from jax.sharding import PartitionSpec as P
    >>> mesh = jax.make_mesh((1,), ("data",))
    >>> def own_gradient(w, x):
    ...   w = optax_dist.local_params(w, "data")
    ...   return jax.grad(lambda w: jnp.sum(x @ w))(w)
    >>> f = jax.shard_map(
    ...     own_gradient, mesh=mesh, in_specs=(P(), P("data")), out_specs=P("data")
    ... )
    >>> x = jax.device_put(jnp.ones((1, 3)), jax.NamedSharding(mesh, P("data")))
    >>> f(jnp.ones(3), x)
    Array([1., 1., 1.], dtype=float32)
  """
  names = axes.canonical_names(axis_name)
  axes.check_bound(names, "local_params")
  return axes.cast_to_varying(params, names)
