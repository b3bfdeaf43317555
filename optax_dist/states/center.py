"""The center of the replicas: read it, restart from it, resize from it."""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist._internal import axes, checks
from optax_dist._internal.leaves import precision
from optax_dist._internal.leaves.random_keys import fold_in, is_key
from optax_dist._internal.placement.replica_blocks import (
  PerReplica,
  is_center_state,
  map_nodes,
  nodes,
)

Tree = TypeVar("Tree")


def center_params(state: Any) -> Any:
  """Returns the parameters to evaluate and to save: the replicas' center.

  Under :func:`optax_dist.elastic_average` this is the center of the exchanges,
  under :func:`optax_dist.local_updates` and its variants the parameters that
  the replicas last agreed on. They are equal on all replicas. (TensorFlow's
  ``swapping_saver``.)

  Args:
    state: a state that contains one of these transforms, for example in a
      chain.

  Returns:
    A pytree like the parameters of one replica, in the dtypes of the center:
    float32 if the parameters are narrower. The groups of ``optax.partition``
    are merged.

  Raises:
    ValueError: if there is no such state, or if several have a center for the
      same parameter.

  Example:
    >>> import jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.elastic_average(
    ...   optax.sgd(0.1), "data", num_replicas=4, learning_rate=0.1
    ... )
    >>> optax_dist.center_params(tx.init({"w": jnp.ones(2)}))
    {'w': Array([1., 1.], dtype=float32)}
  """
  centers = nodes(state, is_center_state)
  if not centers:
    raise ValueError(
      "There must be a state with a center, of elastic_average or local_updates,"
      " in the state; there are 0."
    )
  # Each group of optax.partition has a center, with the parameters of the
  # others masked.
  return functools.reduce(_merge, [node.center for node in centers])


def _merge(center: Any, other: Any) -> Any:
  def merge(x: Any, y: Any) -> Any:
    if not (_is_masked(x) or _is_masked(y)):
      raise ValueError(
        "There must be one state with a center, of elastic_average or"
        " local_updates, for each parameter; there are 2 for one."
      )
    return y if _is_masked(x) else x

  return jax.tree.map(merge, center, other, is_leaf=_is_masked)


def _is_masked(node: Any) -> bool:
  return isinstance(node, optax.MaskedNode)


def reset_to_center(params: Tree, state: Any) -> tuple[Tree, Any]:
  """Resets the replicas to the center.

  Use it if replicas have been initialized separately, and for a replica that
  was restarted. (TensorFlow's ``get_init_op``.) Nothing is communicated: the
  center is on every replica. Optimizer state other than the local centers is
  unchanged.

  Args:
    params: the replicas' parameters, inside a map, or outside of it with a
      leading replica axis.
    state: a state as in :func:`center_params`.

  Returns:
    The parameters, of which those with a center are equal to it, and the state
    with the local centers reset.

  Raises:
    ValueError: as in :func:`center_params`, or if the shapes do not match.

  Example:
    >>> import jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.elastic_average(optax.sgd(0.1), "data", num_replicas=2, rho=0.0)
    >>> state = tx.init(jnp.ones(()))
    >>> optax_dist.states.reset_to_center(jnp.array([3.0, 4.0]), state)[0]
    Array([1., 1.], dtype=float32)
  """
  center = center_params(state)

  def reset(node: Any) -> Any:
    own = node.replica.value
    if "local_center" not in own._fields:
      return node
    local_center = _broadcast(node.center, own.local_center, "local_center")
    own = own._replace(local_center=local_center)
    return node._replace(replica=PerReplica(own))

  new_params = _broadcast(center, params, "params")
  return new_params, map_nodes(reset, state, is_center_state)


def resize_from_center(
  params: Tree, state: Any, num_replicas: int
) -> tuple[Tree, Any]:
  """Changes the number of replicas: new ones start from the center.

  Use it outside of maps, for example after restoring a checkpoint on another
  number of devices. The first replicas are unchanged. A new one has the center
  as its parameters and as its local center; its optimizer state is the mean
  over the old replicas that are finite there, or, if it is not floating-point
  (such as counters), the first one's. Create the transformation again if it was
  given ``num_replicas``.

  Args:
    params: the replicas' parameters, with a leading replica axis.
    state: a state as in :func:`center_params`, whose per-replica parts (see
      :func:`state_specs`) have a leading replica axis.
    num_replicas: the new number of replicas; a positive integer.

  Returns:
    The parameters and the state of ``num_replicas`` replicas. Per-replica parts
    are in host memory: shard them as at the start.

  Raises:
    ValueError: as in :func:`center_params`, or if an array of the parameters or
      the state lacks its leading replica axis.

  Example:
    >>> import jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.elastic_average(optax.sgd(0.1), "data", num_replicas=2, rho=0.0)
    >>> state = tx.init(jnp.ones(()))
    >>> params, state = optax_dist.states.resize_from_center(
    ...   jnp.array([3.0, 4.0]), state, 3
    ... )
    >>> params.tolist()
    [3.0, 4.0, 1.0]
  """
  num_replicas = checks.count("num_replicas", num_replicas)
  center = center_params(state)
  old = _count_replicas(params, center)

  def resize(path: Any, x: Any) -> Any:
    return _resize(path, x, None, old, num_replicas)

  def resize_node(path: Any, node: Any) -> Any:
    if is_center_state(node):
      return node._replace(replica=resize_own(path, node.replica, node.center))
    return resize_own(path, node) if isinstance(node, PerReplica) else node

  def resize_own(path: Any, node: Any, center: Any = None) -> PerReplica:
    own = jax.tree_util.tree_map_with_path(
      lambda rest, x: resize((*path, *rest), x), node.value
    )
    if "local_center" in getattr(own, "_fields", ()):
      own = own._replace(
        local_center=_resize_like_center(
          node.value.local_center, center, old, num_replicas
        )
      )
    return PerReplica(own)

  new_state = jax.tree_util.tree_map_with_path(
    resize_node,
    state,
    is_leaf=lambda node: isinstance(node, PerReplica) or is_center_state(node),
  )
  return _resize_like_center(params, center, old, num_replicas), new_state


def _pairs(params: Any, center: Any) -> tuple[list[tuple], Any]:
  """Returns (path, parameter, its center or None) for each parameter."""
  treedef: Any
  paths_and_leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
  with checks.structure("params", "the center"):
    parts = treedef.flatten_up_to(center)
    if any(not hasattr(c, "shape") and jax.tree.leaves(c) for c in parts):
      raise ValueError("it has one leaf for several of the center's.")
  return [
    (path, x, c if hasattr(c, "shape") else None)
    for (path, x), c in zip(paths_and_leaves, parts, strict=True)
  ], treedef


def _broadcast(center: Any, tree: Any, what: str) -> Any:
  """Returns ``tree`` with the values of the center, in its shapes and places."""
  pairs, treedef = _pairs(tree, center)

  def broadcast(path: Any, x: Any, c: Any) -> Any:
    if c is None:
      return x
    shape = jnp.shape(x)
    if shape not in (c.shape, (*shape[:1], *c.shape)):
      raise ValueError(
        f"reset_to_center: {what}{jax.tree_util.keystr(path)} has shape {shape},"
        f" but its center {c.shape}. It may have one more axis, of the replicas."
      )
    # A copy: it must not share a donated buffer with the center.
    new = jnp.array(jnp.broadcast_to(c, shape), x.dtype, copy=True)
    new = axes.cast_to_varying(new, axes.varying_axes(x))
    if isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer):
      new = jax.device_put(new, x.sharding)
    return new

  return treedef.unflatten([broadcast(*pair) for pair in pairs])


def _count_replicas(params: Any, center: Any) -> int:
  for path, x, c in _pairs(params, center)[0]:
    if c is not None:
      shape = jnp.shape(x)
      if shape != (*shape[:1], *c.shape) or not shape:
        raise ValueError(
          f"resize_from_center: params{jax.tree_util.keystr(path)} has shape"
          f" {shape}, but its center {c.shape}: it must have one more axis in"
          " front, of the replicas. Call it outside of maps."
        )
      return shape[0]
  raise ValueError("resize_from_center: no parameter has a center.")


def _resize_like_center(
  tree: Any, center: Any, old: int, num_replicas: int
) -> Any:
  pairs, treedef = _pairs(tree, center)
  return treedef.unflatten(
    [_resize(path, x, c, old, num_replicas) for path, x, c in pairs]
  )


def _resize(path: Any, x: Any, new: Any, old: int, num_replicas: int) -> Any:
  """Truncates or extends an array's replica axis; new rows are ``new``."""
  shape = jnp.shape(x)
  if shape[:1] != (old,) or (new is not None and shape[1:] != new.shape):
    raise ValueError(
      f"resize_from_center: {jax.tree_util.keystr(path)} has shape {shape}, but"
      f" must have a leading axis of {old}, as the parameters have"
      + ("" if new is None else f", before the center's shape {new.shape}")
      + ". Was the state initialised with the same number of replicas?"
    )
  if is_key(x):
    # Replicas that draw random numbers draw different ones.
    more = [fold_in(x[0], i) for i in range(old, num_replicas)]
    return jnp.concatenate([x[:num_replicas], *(key[None] for key in more)])
  # Arrays on the devices of the old replicas can't be combined with new ones.
  x, new = jax.device_get((x, new))
  if num_replicas <= old:
    return x[:num_replicas]
  if new is None and jnp.issubdtype(x.dtype, jnp.inexact):
    new = _mean_of_finite(x)
  elif new is None:
    new = x[0]
  return np.concatenate(
    [
      x,
      np.stack(
        [new] * (num_replicas - old), dtype=x.dtype, casting="same_kind"
      ),
    ]
  )


def _mean_of_finite(x: np.ndarray) -> np.ndarray:
  """Averages over the replicas with finite values; over all replicas if none has."""
  # A replica that was left out of exchanges must not spoil new ones.
  finite = np.isfinite(x)
  used = finite | ~finite.any(axis=0)
  return np.mean(x, axis=0, where=used, dtype=precision.wide_dtype(x))
