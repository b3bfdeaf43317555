"""Reading the moving averages of parameters."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import checks, parts
from optax_dist._internal.placement.replica_blocks import is_per_replica, nodes
from optax_dist.transforms import params_ema
from optax_dist.transforms.params_ema import ParamsEmaState, is_left_out


def averaged_params(
  state: optax.OptState, params: optax.Params
) -> optax.Params:
  """Returns the moving averages, and the parameters without one.

  Args:
    state: an optax state with states of :func:`optax_dist.params_ema`, anywhere
      in it: in chains, in wrappers, in ``sync_replicas`` (also by its argument
      ``variable_averages``). Those of the groups of ``optax.partition`` are
      merged.
    params: the parameters that the last update led to. If each replica has its
      own, those of all replicas, with a leading replica axis; for averages of
      the common start (``outer``), that: :func:`optax_dist.center_params`.

  Returns:
    A pytree like ``params``, to evaluate or to save, in their dtypes.

  Raises:
    ValueError: if there are no averages, or several for the same parameter, or if
      ``params`` does not match them.

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
  emas = nodes(state, lambda node: isinstance(node, ParamsEmaState))
  if not emas:
    raise ValueError(
      "There are no averages in this state: put optax_dist.params_ema(decay) into"
      " the chain of transforms, or build sync_replicas with `variable_averages`."
    )

  def by_leaf(node: ParamsEmaState) -> Any:
    with checks.structure("params", "the averages"):
      averages = jax.tree.broadcast(node.averages, params, is_leaf=_is_part)
    whole = jax.tree.map(_whole, averages, params, is_leaf=_is_part)
    return params_ema.moved(node._replace(averages=whole), params)

  def pick(param: Any, *averages: Any) -> Any:
    own = [x for x in averages if not is_left_out(x)]
    if len(own) > 1:
      raise ValueError(
        "There must be one average of each parameter; there are"
        f" {len(own)} for one. Pass the part of the state that is meant."
      )
    return own[0].astype(jnp.result_type(param)) if own else param

  return jax.tree.map(pick, params, *map(by_leaf, emas))


def _is_part(x: Any) -> bool:
  return is_left_out(x) or is_per_replica(x)


def _whole(average: Any, param: Any) -> Any:
  """Joins the parts of an average in the state of ``sharded``."""
  if not is_per_replica(average):
    return average
  shape, value = jnp.shape(param), average.value
  if value.shape[1:] != parts.shape_of(shape, value.shape[0]):
    raise ValueError(
      "The averages in a state of sharded are parts of arrays, of shape"
      f" {value.shape} for a parameter of shape {shape}: read them outside of"
      " maps. Parts of parameters that are sharded over model axes too can't be"
      " joined; put params_ema next to sharded in a chain, not into it."
    )
  return parts.whole(value, shape)
