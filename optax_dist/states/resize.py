"""The state of sync_replicas on another number of replicas."""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from optax_dist import quorum
from optax_dist._internal import gradient_sum
from optax_dist._internal.gradient_sum import SparseSum
from optax_dist._internal.replica_blocks import PerReplica
from optax_dist.transforms.sync_replicas import SyncReplica, SyncReplicasState


def resize_replicas(
  state: Any,
  num_replicas: int,
  *,
  departed: Literal["fold", "drop"],
) -> Any:
  """Fits a state of :func:`sync_replicas` to another number of replicas.

  For a job that is resumed from a checkpoint on more or fewer devices. Replicas
  keep their number; the last ones depart, new ones come behind. A new replica
  holds no gradient and is at the current step.

  Args:
    state: an optax state with states of ``sync_replicas`` in it, as a whole: with
      a leading replica axis, outside of the map.
    num_replicas: the new number of replicas; a positive integer.
    departed: what becomes of gradients that are accumulated on a replica that
      departs: ``"fold"`` adds those of replica ``i`` to what replica
      ``i % num_replicas`` holds, so that they count in the next step; ``"drop"``
      drops them, counted as ``dropped["departed"]`` there. The counts of what was
      accepted and dropped before go to the same replica.

  Returns:
    A state of the same structure, for ``total_num_replicas=num_replicas``.

  Raises:
    TypeError, ValueError: if an argument is not as above, if there is no state of
      ``sync_replicas``, if a state has no leading replica axis, or if sparse
      gradients are to be folded that have not enough slots.

  Example:
    >>> import jax.numpy as jnp, optax, optax_dist
    >>> make = lambda n: optax_dist.sync_replicas(
    ...   optax.sgd(0.1), "data", replicas_to_aggregate=3, total_num_replicas=n
    ... )
    >>> state = make(4).init(jnp.zeros(2))
    >>> smaller = optax_dist.resize_replicas(state, 2, departed="fold")
    >>> optax_dist.sync_report(smaller).accepted
    array([0, 0], dtype=int32)
  """
  quorum.check_sync_arguments(num_replicas, num_replicas)
  if departed not in ("fold", "drop"):
    raise ValueError(
      f"`departed` must be one of 'fold', 'drop', got {departed!r}."
    )
  is_state = lambda node: isinstance(node, SyncReplicasState)
  if not any(map(is_state, jax.tree.leaves(state, is_leaf=is_state))):
    raise ValueError("There is no state of sync_replicas in this state.")
  return jax.tree.map(
    lambda node: (
      _resize(node, num_replicas, departed) if is_state(node) else node
    ),
    state,
    is_leaf=is_state,
  )


def _resize(state: SyncReplicasState, num: int, departed: str):
  own = state.replica.value
  if own.local_step.ndim != 1:
    raise ValueError(
      "resize_replicas needs a state with one leading replica axis, as init makes"
      " outside of the map, got local_step of shape"
      f" {own.local_step.shape}."
    )
  old = own.local_step.shape[0]
  if departed == "drop" and old > num:
    own = _drop(own, num)
  # What a sum holds of no gradients is not a zero: see SyncReplica.
  sums = jax.vmap(gradient_sum.clear)(
    own.gradient_sum, own.num_accumulated == 0
  )
  new = SyncReplica(
    gradient_sum=jax.tree.map(
      lambda x: _fold_sum(x, num),
      sums,
      is_leaf=lambda x: isinstance(x, SparseSum),
    ),
    local_step=_pad(own.local_step[:num], num, state.global_step),
    **{
      name: _fold(getattr(own, name), num)
      for name in SyncReplica._fields
      if name not in ("gradient_sum", "local_step")
    },
  )
  # At most one gradient per replica and tick: what the ticks promise must not be
  # less than what the replicas now hold.
  held = jnp.sum(new.num_accumulated)
  ticks = jnp.maximum(state.ticks, -(-held // num)).astype(jnp.int32)
  return state._replace(replica=PerReplica(new), ticks=ticks)


def _drop(own: SyncReplica, num: int) -> SyncReplica:
  leaves = jnp.arange(own.local_step.shape[0]) >= num
  return own._replace(
    num_accumulated=jnp.where(leaves, 0, own.num_accumulated),
    dropped_departed=own.dropped_departed
    + jnp.where(leaves, own.num_accumulated, 0),
  )


def _pad(x: jax.Array, num: int, value: Any) -> jax.Array:
  missing = num - x.shape[0]
  filler = jnp.full((missing, *x.shape[1:]), value, x.dtype)
  return jnp.concatenate([x, filler]) if missing else x


def _fold(x: jax.Array, num: int) -> jax.Array:
  """Adds entry ``i`` of the leading axis to entry ``i % num``."""
  rounds = -(-x.shape[0] // num)
  return jnp.sum(
    _pad(x, rounds * num, 0).reshape(rounds, num, *x.shape[1:]),
    axis=0,
    dtype=x.dtype,
  )


def _fold_sum(total: Any, num: int) -> Any:
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
    lambda x: jnp.moveaxis(x.reshape(rounds, num, *x.shape[1:]), 0, 1).reshape(
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
  return jax.tree.map(lambda x: x[:, :capacity], merged)
