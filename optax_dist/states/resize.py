"""Resizes the state of sync_replicas to another number of replicas."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from optax_dist._internal import checks, gradient_sum
from optax_dist._internal.gradient_sum import SparseSum
from optax_dist._internal.leaves.random_keys import is_key
from optax_dist._internal.placement.replica_blocks import (
  PerReplica,
  map_nodes,
  nodes,
)
from optax_dist.transforms.sync_replicas import SyncReplica, SyncReplicasState


def resize_replicas(
  state: Any,
  num_replicas: int,
  *,
  departed: Literal["fold", "drop"],
) -> Any:
  """Resizes a state of :func:`sync_replicas` to another number of replicas.

  Use it to resume a job from a checkpoint on more or fewer devices. Replicas
  keep their index; the last ones are removed, and new ones are appended. A new
  replica holds no gradient and is at the current step.

  Args:
    state: a complete optax state with states of ``sync_replicas`` in it: with a
      leading replica axis, outside of the map.
    num_replicas: the new number of replicas; a positive integer.
    departed: what to do with gradients accumulated on a removed replica:
      ``"fold"`` adds those of replica ``i`` to the ones of replica ``i %
      num_replicas``, so that they count in the next step; ``"drop"`` drops
      them, counted there as ``dropped["departed"]``. The earlier counts of
      accepted and dropped gradients go to the same replica.

  Returns:
    A state of the same structure, for ``total_num_replicas=num_replicas``.
    Per-replica parts are in host memory: shard them as at the start.

  Raises:
    TypeError, ValueError: if an argument is invalid, if there is no state of
      ``sync_replicas``, if a state has no leading replica axis, or if there are
      not enough slots to fold sparse gradients.

  Example:
    >>> import jax.numpy as jnp, optax, optax_dist
    >>> make = lambda n: optax_dist.sync_replicas(
    ...   optax.sgd(0.1), "data", replicas_to_aggregate=3, total_num_replicas=n
    ... )
    >>> state = make(4).init(jnp.zeros(2))
    >>> smaller = optax_dist.states.resize_replicas(state, 2, departed="fold")
    >>> optax_dist.sync_report(smaller).accepted
    array([0, 0], dtype=int32)
  """
  num_replicas = checks.count("num_replicas", num_replicas)
  checks.one_of("departed", departed, ("fold", "drop"))
  is_state = lambda node: isinstance(node, SyncReplicasState)
  if not nodes(state, is_state):
    raise ValueError("There is no state of sync_replicas in this state.")
  resize = lambda node: _resize(node, num_replicas, departed)
  return map_nodes(resize, state, is_state)


def on_host(transform_name: str, x: Any) -> Any:
  """Takes an array off its mesh, whose size and shardings no longer fit."""
  if isinstance(x, jax.core.Tracer) or not isinstance(x, jax.Array):
    return x
  if not x.is_fully_addressable:
    raise ValueError(
      f"{transform_name} needs the state of all replicas in this process, and some"
      " of it lies on other hosts' devices. Restore it from a checkpoint into host"
      " memory, or gather it with"
      " jax.experimental.multihost_utils.process_allgather(state, tiled=True)."
    )
  if is_key(x):
    data = jnp.asarray(np.asarray(jax.random.key_data(x)))
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(x))
  return np.asarray(x)


def _resize(
  state: SyncReplicasState, num: int, departed: str
) -> SyncReplicasState:
  own = jax.tree.map(
    lambda x: on_host("resize_replicas", x), state.replica.value
  )
  if own.local_step.ndim != 1:
    raise ValueError(
      "resize_replicas needs a state with one leading replica axis, as init makes"
      " outside of the map, got local_step of shape"
      f" {own.local_step.shape}."
    )
  old = own.local_step.shape[0]
  if departed == "drop" and old > num:
    own = _drop(own, num)
  step = on_host("resize_replicas", state.global_step)
  new = SyncReplica(
    gradient_sum=jax.tree.map(
      lambda x: _fold_sum(x, own.num_accumulated == 0, num),
      own.gradient_sum,
      is_leaf=lambda x: isinstance(x, SparseSum),
    ),
    local_step=_pad(own.local_step[:num], num, step),
    **{
      name: _fold(getattr(own, name), num)
      for name in SyncReplica._fields
      if name not in ("gradient_sum", "local_step")
    },
  )
  # From here on it increases with each iteration; if all arrive it is the divisor.
  at_most = jnp.sum(new.num_accumulated, dtype=jnp.int32)
  return state._replace(replica=PerReplica(new), at_most=at_most)


def _drop(own: Any, num: int) -> Any:
  leaves = np.arange(own.local_step.shape[0]) >= num
  return own._replace(
    num_accumulated=np.where(leaves, 0, own.num_accumulated),
    dropped_departed=own.dropped_departed
    + np.where(leaves, own.num_accumulated, 0),
  )


def _pad(x: Any, num: int, value: Any) -> Any:
  missing = num - x.shape[0]
  filler = np.full((missing, *x.shape[1:]), value, x.dtype)
  return np.concatenate([x, filler]) if missing else x


def _fold(x: Any, num: int) -> Any:
  """Adds entry ``i`` of the leading axis to entry ``i % num``."""
  rounds = -(-x.shape[0] // num)
  return np.sum(
    _pad(x, rounds * num, 0).reshape(rounds, num, *x.shape[1:]),
    axis=0,
    dtype=x.dtype,
  )


def _fold_sum(total: Any, empty: np.ndarray, num: int) -> Any:
  if not isinstance(total, SparseSum) and is_key(total):
    # A random key among the parameters, which has no gradient.
    return total[np.zeros(num, int)]
  rows = lambda x: empty.reshape(-1, *[1] * (x.ndim - 1))
  total = jax.tree.map(
    lambda x, zero: np.where(rows(x), np.asarray(zero), x),
    total,
    gradient_sum.empty(total),
  )
  if not isinstance(total, SparseSum):
    return _fold(total, num)
  old, capacity = total.touches.shape
  rounds = -(-old // num)
  filled = SparseSum(
    values=_pad(total.values, rounds * num, 0),
    indices=_pad(total.indices, rounds * num, gradient_sum.UNUSED),
    touches=_pad(total.touches, rounds * num, 0),
  )
  together = jax.tree.map(
    lambda x: np.moveaxis(x.reshape(rounds, num, *x.shape[1:]), 0, 1).reshape(
      num, rounds * capacity, *x.shape[2:]
    ),
    filled,
  )
  merged = jax.vmap(gradient_sum.merge)(together)
  beyond = merged.indices[:, capacity:]
  if bool(jnp.any(beyond < gradient_sum.UNUSED)):
    raise ValueError(
      "The sparse gradients of departed replicas have more rows than the"
      f" `sparse_capacity` of {capacity}: use departed='drop'."
    )
  return jax.tree.map(lambda x: np.asarray(x[:, :capacity]), merged)
