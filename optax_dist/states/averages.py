"""Reading the moving averages of parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal.moving_averages import is_left_out
from optax_dist._internal.replica_blocks import nodes
from optax_dist.transforms.sync_replicas import SyncReplicasState


def averaged_params(
  state: optax.OptState, params: optax.Params
) -> optax.Params:
  """Returns the moving averages, and the parameters without one.

  Args:
    state: an optax state with states of :func:`optax_dist.sync_replicas`, at
      least one of them built with ``variable_averages``. Those of the groups of
      ``optax.partition`` are merged.
    params: the parameters.

  Returns:
    A pytree like ``params``, to evaluate or to save, in their dtypes. The state
    holds the averages themselves as ``averages``, which may have a wider dtype.

  Raises:
    ValueError: if there are no averages, or several for the same parameter.

  Example:
    >>> import jax.numpy as jnp, optax, optax_dist
    >>> tx = optax_dist.sync_replicas(
    ...   optax.sgd(0.1), "data", replicas_to_aggregate=3, total_num_replicas=4,
    ...   variable_averages=0.99, variables_to_average={"w": True, "step": False},
    ... )
    >>> params = {"w": 1.0, "step": 2.0}
    >>> optax_dist.averaged_params(tx.init(params), {"w": 5.0, "step": 3.0})
    {'step': 3.0, 'w': Array(1., dtype=float32)}
  """
  is_state = lambda node: isinstance(node, SyncReplicasState)
  averages = [node.averages for node in nodes(state, is_state)]
  found = [tree for tree in averages if tree is not None]
  if not found:
    raise ValueError(
      "There are no averages in this state: build sync_replicas with"
      " `variable_averages`."
    )
  by_leaf = lambda tree: jax.tree.broadcast(tree, params, is_leaf=is_left_out)

  def pick(param: Any, *averages: Any) -> Any:
    own = [x for x in averages if not is_left_out(x)]
    if len(own) > 1:
      raise ValueError(
        "There must be one average of each parameter, of one sync_replicas; there"
        f" are {len(own)} for one."
      )
    return own[0].astype(jnp.result_type(param)) if own else param

  return jax.tree.map(pick, params, *map(by_leaf, found))
