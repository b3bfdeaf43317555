"""Parameters with a separate gradient on each replica."""

import optax

from optax_dist._internal import axes


def local_params(
  params: optax.Params, axis_name: axes.AxisNames
) -> optax.Params:
  """Casts replicated parameters so that each replica gets its own gradient.

  Under ``jax.shard_map`` with ``check_vma=True`` (the default) ``jax.grad``
  with respect to replicated parameters returns the gradient *summed over all
  replicas*. A replica's own gradient is needed to clip or drop it before
  aggregation, and by :func:`optax_dist.sync_replicas` and all other transforms
  that aggregate themselves::

    grads = jax.grad(loss)(optax_dist.local_params(params, "data"), batch)

  In every other map the gradient is already the replica's own, and the
  parameters are returned unchanged. Values never change and no data is moved.

  Args:
    params: a pytree of arrays.
    axis_name: the mesh axis, or a sequence of axes, over the replicas.

  Returns:
    The same parameters, marked as varying over ``axis_name`` if JAX tracks
    that.

  Raises:
    UnboundAxisError: if an axis is not bound.

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
