"""Moving averages of the parameters, to evaluate with."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist._internal import checks
from optax_dist._internal.leaves import precision

_NAME = "params_ema"


class ParamsEmaState(NamedTuple):
  """State of :func:`params_ema`.

  Attributes:
    num_updates: updates so far (int32 scalar).
    pending_rate: how far the averages still have to move towards the parameters that
      the last update led to (float32 scalar): 1 - decay, or 0 before the first
      update.
    averages: moving averages, without this last move: a tree like the
      parameters, with ``optax.MaskedNode`` for those that have none.
  """

  num_updates: jax.Array
  pending_rate: jax.Array
  averages: Any


def params_ema(
  decay: float,
  *,
  num_updates: bool = False,
  mask: Any = None,
  dtype: Any = None,
) -> optax.GradientTransformationExtraArgs:
  """Keeps exponential moving averages of the parameters; updates pass unchanged.

  They start as the parameters, and move once for each update, towards the
  parameters after it: ``average -= (1 - decay) * (average - parameter)``. Read
  them with ``averaged_params(state, params)`` (:func:`averaged_params`).

  An update moves the averages towards the parameters that it is *given*, which
  the previous one led to; ``averaged_params`` makes the last move, with the
  parameters that it is given. So the place in a chain does not matter, and what
  is averaged is what the parameters really were, whatever a later transform, a
  constraint or an exchange with other replicas did to them:

  * next to ``cross_shard``, inside ``sync_replicas``, or in the optimizer that is
    given to ``coordinator.join``: the parameters that all replicas share, which
    move once per step, whatever was dropped on the way to it;
  * inside ``sharded``: the same, with a part of the averages on each replica;
  * as ``inner`` of ``local_updates``, ``diloco`` or ``elastic_average``: averages
    of each replica's own parameters, to be read with these; as ``outer``:
    averages of the common start, to be read with :func:`center_params`;
  * inside ``optax.MultiSteps``: the parameters after each whole step.

  It also averages other trees that change, such as batch statistics: see the
  second example.

  Args:
    decay: the decay, a number from 0 to 1.
    num_updates: whether the decay starts smaller: ``min(decay, (1 + n) / (10 +
      n))`` for the n-th update. In TensorFlow this is ``num_updates=global_step``.
    mask: which parameters are averaged: a pytree of booleans like ``params`` (or
      a prefix of it), a function of ``params`` that returns one, or None for
      all. Integers and random keys have no average.
    dtype: dtype of the averages; None for each parameter's own, or float32 if
      that is narrower.

  Returns:
    A :class:`optax.GradientTransformationExtraArgs` with a
    :class:`ParamsEmaState`. It does not communicate.

  Raises:
    ValueError: at construction, if an argument is invalid; in ``init``, if
      ``mask`` does not match ``params``; in ``update``, if there are no
      parameters, or they don't match the averages.

  Example:
    >>> import jax.numpy as jnp, optax, optax_dist
    >>> tx = optax.chain(optax.sgd(1.0), optax_dist.params_ema(0.75))
    >>> params = {"w": jnp.zeros(2)}
    >>> state = tx.init(params)
    >>> for gradient in [-1.0, -2.0]:
    ...   updates, state = tx.update({"w": jnp.full(2, gradient)}, state, params)
    ...   params = optax.apply_updates(params, updates)
    >>> params["w"]  # First 1, then 3.
    Array([3., 3.], dtype=float32)
    >>> optax_dist.averaged_params(state, params)["w"]  # First 0.25.
    Array([0.9375, 0.9375], dtype=float32)

    Statistics of a model are given to ``update`` as they were before the step,
    like parameters:

    >>> ema = optax_dist.params_ema(0.75)
    >>> stats = {"mean": jnp.zeros(1)}
    >>> ema_state = ema.init(stats)
    >>> for new in [1.0, 3.0]:
    ...   _, ema_state = ema.update(None, ema_state, stats)
    ...   stats = {"mean": jnp.full(1, new)}
    >>> optax_dist.averaged_params(ema_state, stats)["mean"]
    Array([0.9375], dtype=float32)

  References:
    TensorFlow 1, `tf.compat.v1.train.ExponentialMovingAverage
    <https://www.tensorflow.org/api_docs/python/tf/compat/v1/train/ExponentialMovingAverage>`_.
  """
  checks.fraction("decay", decay, "a decay ")
  checks.flag("num_updates", num_updates)
  precision.check_dtype("dtype", dtype)

  def init_fn(params: optax.Params) -> ParamsEmaState:
    return ParamsEmaState(
      num_updates=jnp.zeros([], jnp.int32),
      pending_rate=jnp.zeros([], jnp.float32),
      averages=_start(params, mask, dtype),
    )

  def update_fn(
    updates: optax.Updates,
    state: ParamsEmaState,
    params: optax.Params | None = None,
    **extra_args: Any,
  ) -> tuple[optax.Updates, ParamsEmaState]:
    del extra_args
    if params is None and jax.tree.leaves(state.averages):
      raise ValueError(
        f"{_NAME} needs the parameters: call update(updates, state, params)."
      )
    n = optax.safe_increment(state.num_updates)
    # In float32, as in TensorFlow: 1 - 0.9999 is 1.00016e-4 there.
    bound = jnp.float32(decay)
    if num_updates:
      steps = n.astype(jnp.float32)
      bound = jnp.minimum(bound, (1 + steps) / (10 + steps))
    rate = 1 - bound
    return updates, ParamsEmaState(n, rate, moved(state, params))

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def is_left_out(x: Any) -> bool:
  """Whether ``x`` is in the place of a parameter without an average."""
  return isinstance(x, optax.MaskedNode)


def moved(state: ParamsEmaState, params: optax.Params) -> Any:
  """Returns the averages after their last move.

  Args:
    state: the state after an update; also of several replicas, with a leading
      axis of its arrays.
    params: the parameters that this update led to.

  Raises:
    ValueError: if ``params`` does not match the averages.
  """

  def move(path: Any, average: Any, param: Any) -> Any:
    if is_left_out(average):
      return average
    if jnp.shape(average) != jnp.shape(param):
      raise ValueError(
        f"{_NAME}: params{jax.tree_util.keystr(path)} has shape"
        f" {jnp.shape(param)}, but its average {jnp.shape(average)}. Averages of"
        " parameters that each replica trains by itself go with the parameters of"
        " all replicas, which have a leading replica axis."
      )
    ones = [1] * (jnp.ndim(average) - jnp.ndim(state.pending_rate))
    rate = jnp.reshape(
      state.pending_rate, (*jnp.shape(state.pending_rate), *ones)
    ).astype(average.dtype)
    new = average - rate * (average - precision.cast_like(param, average))
    # "where", so that a NaN in the parameter has no effect if nothing is to move.
    return jnp.where(rate == 0, average, new)

  return jax.tree_util.tree_map_with_path(
    move, state.averages, params, is_leaf=is_left_out
  )


def _start(params: optax.Params, mask: Any, dtype: Any) -> Any:
  """Returns the initial averages: the parameters themselves."""

  def copy_leaf(x: Any) -> Any:
    if not jnp.issubdtype(jnp.result_type(x), jnp.inexact):
      return optax.MaskedNode()
    # A copy: it must not share a donated buffer with the parameters.
    return jnp.array(x, precision.wide_dtype(x, dtype))

  copy = lambda tree: jax.tree.map(copy_leaf, tree)
  if callable(mask):
    mask = mask(params)
  if mask is None:
    return copy(params)

  def start(use: Any, part: Any) -> Any:
    if not isinstance(use, bool | np.bool_):
      raise ValueError(f"it has {use!r:.100}.")
    return copy(part) if use else optax.MaskedNode()

  try:
    return jax.tree.map(start, mask, params)
  except ValueError as error:
    raise ValueError(
      f"{_NAME}: `mask` must be a pytree of booleans like `params`, but {error}"
    ) from error
