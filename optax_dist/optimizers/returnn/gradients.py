"""The changes of gradients by RETURNN's TensorFlow backend, before the optimizer."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import axes
from optax_dist._internal.indexed_slices import (
  as_dense,
  is_indexed_slices,
  map_values,
  values_of,
)
from optax_dist.optimizers._internal import complex_numbers, hyperparameters
from optax_dist.optimizers.returnn.options import Options
from optax_dist.sparse import rows

#: The norm of all gradients of a step, as they came; an argument of `update`.
_NORM = "returnn_gradient_norm"
#: RETURNN's default of `random_seed`.
_SEED = 42


class GradientNoiseState(NamedTuple):
  """State of the noise.

  Attributes:
    rng_key: The key of the next noise.
  """

  rng_key: jax.Array


class AccumulatedState(NamedTuple):
  """State of gradient accumulation.

  Attributes:
    mini_step: Gradients in the sum, an int32 scalar.
    gradient_sum: The sum of the gradients since the last step.
    inner_state: State of the optimizer.
  """

  mini_step: jax.Array
  gradient_sum: optax.Updates
  inner_state: optax.OptState


def before(
  optimizer: optax.GradientTransformationExtraArgs, options: Options
) -> optax.GradientTransformationExtraArgs:
  """Puts RETURNN's changes of gradients before an optimizer, in RETURNN's order.

  RETURNN sums gradients, adds noise, clips each number, the norm of each variable
  and its average norm, clips by the global norm, replaces numbers that are not finite
  and drops gradients that are too large. Both global norms are those of the incoming
  gradient: without noise, not clipped, and of an accumulated gradient only the last.

  Source: ``returnn.tf.updater.Updater._post_process_grad``.
  """
  limit = options.limit
  changes: list[Callable[[Any, jax.Array], Any]] = []
  if clip := limit("gradient_clip"):
    changes.append(_values(lambda x: jnp.clip(x, -clip, clip)))
  if norm := _finite(options, "gradient_clip_norm"):
    changes.append(_values(lambda x: _clip_norm(x, norm)))
  if average := _finite(options, "gradient_clip_avg_norm"):
    changes.append(
      lambda updates, _: jax.tree.map(
        lambda x: _clip_norm(x, average * x.size), as_dense(updates)
      )
    )
  needs_norm = False
  if total := _finite(options, "gradient_clip_global_norm"):
    needs_norm = True
    changes.append(
      lambda updates, norm: map_values(
        lambda x: scaled(x, _global_factor(norm, total)), updates
      )
    )
  if options.flag("gradient_nan_inf_filter"):
    changes.append(_values(lambda x: jnp.where(jnp.isfinite(x), x, 0)))
  if most := limit("grad_norm_to_clip_to_zero"):
    needs_norm = True
    changes.append(
      lambda updates, norm: jax.tree.map(
        lambda x: jnp.where(jnp.isfinite(norm) & (norm <= most), x, 0),
        as_dense(updates),
      )
    )
  tx = optimizer
  if changes:
    tx = optax.chain(_all_of(changes), tx)
  if deviation := _finite(options, "gradient_noise"):
    tx = optax.chain(noise(deviation, options), tx)
  tx = accumulated(tx, accumulated_steps(options))
  return _with_norm(tx) if needs_norm else tx


def accumulated_steps(options: Options) -> int:
  """How many gradients make a step."""
  value = options.get("accum_grad_multiple_step")
  if callable(value):
    raise ValueError(
      "accum_grad_multiple_step must be a number here, got a function: leave it out"
      " and put optax.MultiSteps(tx, every_k_schedule=..., use_grad_mean=False)"
      " around the optimizer, with a function of the optimizer's steps"
    )
  steps = options.whole("accum_grad_multiple_step")
  if steps < 0:
    raise ValueError(
      f"accum_grad_multiple_step must be positive, or 0 for off, got {steps}"
    )
  return max(steps, 1)


def noise(
  deviation: float, options: Options
) -> optax.GradientTransformationExtraArgs:
  """Adds noise of a normal distribution cut off at two standard deviations.

  Its own standard deviation is 0.88 of that. The originals draw from other random
  numbers.
  """
  seed = options.whole("random_seed", _SEED)

  def init_fn(params):
    del params
    return GradientNoiseState(jax.random.PRNGKey(seed))

  def update_fn(updates, state, params=None, **extra_args):
    del params, extra_args
    updates = as_dense(updates)
    leaves, treedef = jax.tree.flatten(updates)
    next_key, *keys = jax.random.split(state.rng_key, len(leaves) + 1)

    def noisy(x, key):
      dtype = hyperparameters.wide_dtype(x.dtype)
      noise = jax.random.truncated_normal(key, -2, 2, x.shape, dtype)
      return x + (deviation * noise).astype(x.dtype)

    leaves = [noisy(x, key) for x, key in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(treedef, leaves), GradientNoiseState(next_key)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def accumulated(
  inner: optax.GradientTransformationExtraArgs, steps: int
) -> optax.GradientTransformationExtraArgs:
  """Sums gradients, and takes a step with every so many of them.

  Unlike ``optax.MultiSteps``, it starts each sum anew. MultiSteps multiplies the old
  sum by 0, so a gradient that is not finite would make all later sums NaN.
  """
  if steps == 1:
    return inner

  def init_fn(params):
    return AccumulatedState(
      jnp.zeros([], jnp.int32),
      optax.tree.zeros_like(params),
      inner.init(params),
    )

  def update_fn(updates, state, params=None, **extra_args):
    is_first = state.mini_step == 0
    leaves, treedef = rows.flatten_gradients(as_dense(updates))
    sums = treedef.flatten_up_to(state.gradient_sum)
    # A missing gradient stays missing, whatever was summed.
    sums = [
      old
      if new is None
      else jnp.where(is_first, new, new + old).astype(old.dtype)
      for new, old in zip(leaves, sums, strict=True)
    ]
    total = jax.tree.unflatten(
      treedef,
      [None if new is None else x for new, x in zip(leaves, sums, strict=True)],
    )

    def step():
      return inner.update(total, state.inner_state, params, **extra_args)

    def wait():
      types = jax.eval_shape(step)[0]
      return jax.tree.map(axes.zeros, types), state.inner_state

    is_last = state.mini_step == steps - 1
    updates, inner_state = axes.when(is_last, step, wait)
    mini_step = (state.mini_step + 1) % steps
    sums = jax.tree.unflatten(treedef, sums)
    return updates, AccumulatedState(mini_step, sums, inner_state)

  return optax.GradientTransformationExtraArgs(init_fn, update_fn)


def decayed_before(
  inner: optax.GradientTransformationExtraArgs, l2: Any
) -> optax.GradientTransformationExtraArgs:
  """Multiplies parameters by ``1 - 2 * l2`` before each step of an optimizer.

  This is RETURNN's ``decouple_constraints``: the gradient of ``l2 * sum(w ** 2)``,
  whatever the learning rate. A rule that reads the parameters reads the new ones.

  Args:
    inner: The optimizer.
    l2: Each parameter's, as a tree that is a prefix of the parameters, or one
      number for all. 0 or None for none.

  Source: ``returnn.tf.updater.Updater.get_apply_grads_op``.
  """
  for value in jax.tree.leaves(l2):
    hyperparameters.check_not_negative(l2=value)

  def decays(params):
    """The change of each parameter, None where there is none."""

    def on_part(factor, part):
      if factor is None or (hyperparameters.is_static(factor) and factor == 0):
        return jax.tree.map(lambda _: None, part)
      return jax.tree.map(lambda w: -(w * (2 * factor)).astype(w.dtype), part)

    try:
      return jax.tree.map(on_part, l2, params, is_leaf=lambda x: x is None)
    except ValueError as error:
      raise ValueError(
        "l2 must be a number, or a tree that is a prefix of the parameters: a number"
        f" for each part of them. {error}"
      ) from error

  def update_fn(updates, state, params=None, **extra_args):
    if params is None:
      raise ValueError(
        "decouple_constraints decays the parameters: call update(grads, state,"
        " params)"
      )
    leaves, treedef = rows.flatten_gradients(updates)
    old = treedef.flatten_up_to(params)
    changes = [
      None if gradient is None else change
      for gradient, change in zip(
        leaves, treedef.flatten_up_to(decays(params)), strict=True
      )
    ]
    decayed = [
      w if change is None else w + change
      for w, change in zip(old, changes, strict=True)
    ]
    updates, state = inner.update(
      updates, state, jax.tree.unflatten(treedef, decayed), **extra_args
    )
    leaves = [
      update if change is None else update + change
      for update, change in zip(
        treedef.flatten_up_to(updates), changes, strict=True
      )
    ]
    return jax.tree.unflatten(treedef, leaves), state

  return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def global_norm(updates: optax.Updates) -> jax.Array:
  """The norm of all updates, of sparse ones of the values as they are."""
  leaves = jax.tree.leaves(updates, is_leaf=is_indexed_slices)
  squares = [_sum_of_squares(values_of(x)) for x in leaves]
  dtype = jnp.result_type(jnp.float32, *(x.dtype for x in squares))
  return jnp.sqrt(sum((x.astype(dtype) for x in squares), jnp.zeros([], dtype)))


def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
  """Multiplies an update by a scalar, in the update's dtype."""
  return x * factor.astype(jnp.real(x).dtype)


def _finite(options: Options, name: str) -> float:
  """A limit that is finite: of an infinite one, TensorFlow's kernels make NaN."""
  value = options.limit(name)
  if math.isinf(value):
    raise ValueError(
      f"{name} must be finite, or 0 for off, got {value}: RETURNN computes NaN"
      " from it"
    )
  return value


def _values(fun):
  """Applies a function to each number; of a sparse gradient, to the numbers it has."""
  return lambda updates, _: map_values(fun, updates)


def _all_of(changes):
  """Applies changes of updates that depend on their norm as they came."""

  def update_fn(updates, state, params=None, **extra_args):
    del params
    for change in changes:
      updates = change(updates, extra_args.get(_NORM))
    return updates, state

  return optax.GradientTransformationExtraArgs(
    lambda _: optax.EmptyState(), update_fn
  )


def _with_norm(inner):
  """Passes the norm of the incoming updates on to the inner transformation."""

  def update_fn(updates, state, params=None, **extra_args):
    extra_args[_NORM] = global_norm(updates)
    return inner.update(updates, state, params, **extra_args)

  return optax.GradientTransformationExtraArgs(inner.init, update_fn)


def _sum_of_squares(x):
  square = complex_numbers.abs_square(x)
  return jnp.sum(jnp.real(square), dtype=hyperparameters.wide_dtype(x.dtype))


def _clip_norm(x, limit):
  norm = jnp.sqrt(_sum_of_squares(x))
  return scaled(x, limit / jnp.maximum(norm, limit))


def _global_factor(norm, limit):
  # NaN for a norm that is not finite, as in tf.clip_by_global_norm.
  return limit / jnp.maximum(norm, limit) + (norm - norm)
