"""Reading the moving averages of parameters."""

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal.moving_averages import is_left_out


def averaged_params(
  state: optax.OptState, params: optax.Params
) -> optax.Params:
  """Returns the moving averages, and the parameters without one.

  Args:
    state: an optax state with a state of :func:`optax_dist.sync_replicas` that
      was built with ``variable_averages``.
    params: the parameters.

  Returns:
    A pytree like ``params``, to evaluate or to save, in their dtypes. The state
    holds the averages themselves as ``averages``, which may have a wider dtype.

  Raises:
    ValueError: if there are no averages.

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
  averages = optax.tree.get(state, "averages")
  if averages is None:
    raise ValueError(
      "There are no averages in this state: build sync_replicas with"
      " `variable_averages`."
    )
  return jax.tree.map(
    lambda average, param: (
      param if is_left_out(average) else average.astype(jnp.result_type(param))
    ),
    averages,
    params,
    is_leaf=is_left_out,
  )
