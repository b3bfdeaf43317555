"""A base for custom optimizers: define one by an apply rule for one leaf."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_dist._internal import checks, indexed_slices, step_count
from optax_dist.optimizers._internal import hyperparameters
from optax_dist.sparse import rows


@dataclasses.dataclass(frozen=True)
class Step:
  """The current step, for an apply rule.

  Attributes:
    learning_rate: The learning rate of this step, a number or an array of the
      leaf's dtype.
    count: Steps before this one, an int32 scalar.
    scalars: The optimizer's own scalars, float32, before this step.
    extra_args: Further arguments of ``update``.
  """

  learning_rate: Any
  count: jax.Array
  scalars: dict[str, jax.Array]
  extra_args: dict[str, Any]


class CustomState(NamedTuple):
  """State of an optimizer created by :func:`base_custom`.

  Attributes:
    step: Steps so far, an int32 scalar in a named tuple: its ``global_step``; or,
      inside a transform whose state has that, its ``count``.
    scalars: Scalars of the whole optimizer by name, float32 (TensorFlow's
      "non-slot variables", such as ``beta1_power``).
    slots: Trees like the parameters by name, in the parameters' dtypes.
  """

  step: step_count.StepState
  scalars: dict[str, jax.Array]
  slots: dict[str, optax.Params]


ApplyRule = Callable[
  [jax.Array, Any, dict[str, jax.Array], Step],
  tuple[jax.Array, dict[str, jax.Array]],
]
SparseApplyRule = Callable[
  [indexed_slices.IndexedSlices, Any, dict[str, jax.Array], Step],
  tuple[Any, dict[str, jax.Array]],
]


class ScalarRule(NamedTuple):
  """The initial value and the update rule of a scalar of the whole optimizer.

  Attributes:
    initial: Its value at step 0.
    advance: Computes the next value from the value and the :class:`Step`.
  """

  initial: Any
  advance: Callable[[jax.Array, Step], jax.Array]


def base_custom(
  apply_rule: ApplyRule,
  learning_rate: hyperparameters.ScalarOrSchedule,
  *,
  slots: Mapping[str, hyperparameters.Scalar] | None = None,
  scalars: Mapping[str, ScalarRule] | None = None,
  sparse_apply_rule: SparseApplyRule | None = None,
  sum_duplicates: bool = False,
  needs_params: bool = False,
) -> optax.GradientTransformationExtraArgs:
  """Creates an optimizer from a rule for one leaf.

  Args:
    apply_rule: Takes the gradient of one leaf, the leaf (``None`` if ``update``
      was called without parameters), its slots by name and the :class:`Step`,
      and returns the update, to be added to the leaf, and the new slots. All
      arrays have the leaf's shape and dtype.
    learning_rate: A number, a scalar array or a schedule of the step count.
    slots: Initial values of the slots by name.
    scalars: Scalars of the whole optimizer by name.
    sparse_apply_rule: Like ``apply_rule``, for a sparse gradient: takes an
      :class:`~optax_dist.IndexedSlices` and the whole leaf and slots, and
      returns a dense or sparse update. Without it, ``apply_rule`` is called on
      the touched rows alone, with the same rows of the leaf and of its slots.
    sum_duplicates: Whether to sum repeated indices before calling either rule.
      The original does not: each repetition is a separate row, their updates
      add up, and one of their slots, unspecified which, is kept.
    needs_params: Whether the rule reads the leaf.

  Returns:
    A transformation with a :class:`CustomState`. A ``None`` gradient leaves its
    leaf and slots unchanged. ``update`` raises a ``ValueError`` if it is called
    without parameters and the rule needs them.

  Source: ``returnn.tf.updater.BaseCustomOptimizer``.

  Example:
    >>> import jax.numpy as jnp
    >>> def sign_rule(grad, param, slots, step):
    ...   return -step.learning_rate * jnp.sign(grad), slots
    >>> optimizer = base_custom(sign_rule, learning_rate=0.5)
    >>> params = jnp.array([1.0, 2.0])
    >>> state = optimizer.init(params)
    >>> updates, state = optimizer.update(jnp.array([-3.0, 0.1]), state)
    >>> optax.apply_updates(params, updates).tolist()
    [1.5, 1.5]
  """
  hyperparameters.check_learning_rate(learning_rate)
  checks.function("apply_rule", apply_rule)
  if sparse_apply_rule is not None:
    checks.function("sparse_apply_rule", sparse_apply_rule)
  slots = _by_name("slots", slots)
  scalars = _by_name("scalars", scalars)
  hyperparameters.check_numbers(**slots)
  checks.flag("sum_duplicates", sum_duplicates)
  checks.flag("needs_params", needs_params)

  def init_fn(params):
    return CustomState(
      step=step_count.init(),
      scalars={
        name: jnp.asarray(rule.initial, jnp.float32)
        for name, rule in scalars.items()
      },
      slots={
        name: optax.tree.full_like(params, hyperparameters.rounded(initial))
        for name, initial in slots.items()
      },
    )

  def update_fn(updates, state, params=None, **extra_args):
    if needs_params and params is None and updates is not None:
      raise ValueError(
        "this optimizer reads the parameters: call update(grads, state, params)"
      )
    count = step_count.of(state.step)
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    step = Step(rate, count, state.scalars, extra_args)
    updates, new_slots = _apply(rule, updates, params, state.slots, step)
    new_scalars = {
      name: scalars[name].advance(value, step)
      for name, value in state.scalars.items()
    }
    state = CustomState(step_count.after(state.step), new_scalars, new_slots)
    return updates, state

  def rule(grad, param, old, step):
    if not indexed_slices.is_indexed_slices(grad):
      return apply_rule(grad, param, old, step)
    # Without a sparse_apply_rule, row_wise has converted the gradient before.
    assert sparse_apply_rule is not None
    if sum_duplicates:
      grad = indexed_slices.sum_duplicates(grad)
    return sparse_apply_rule(grad, param, old, step)

  transformation = optax.GradientTransformationExtraArgs(init_fn, update_fn)
  if sparse_apply_rule is not None:
    return transformation
  return rows.row_wise(transformation, sum_duplicates=sum_duplicates)


def _by_name(argument: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
  given = {} if given is None else given
  checks.kind(argument, given, Mapping, "a mapping from names, or None")
  for name in given:
    checks.kind(argument, name, str, "a mapping from strings")
  return dict(given)


def _apply(
  rule: Callable[..., Any],
  updates: Any,
  params: Any,
  slots: dict[str, optax.Params],
  step: Step,
) -> tuple[Any, dict[str, optax.Params]]:
  """Applies a rule to each leaf with a gradient, in the parameters' dtypes."""
  leaves, treedef = rows.flatten_gradients(updates)
  param_leaves = [None] * len(leaves)
  if params is not None:
    param_leaves = treedef.flatten_up_to(params)
  slot_leaves = {
    name: treedef.flatten_up_to(tree) for name, tree in slots.items()
  }
  for i, (grad, param) in enumerate(zip(leaves, param_leaves, strict=True)):
    if grad is None:
      continue
    old = {name: arrays[i] for name, arrays in slot_leaves.items()}
    # Without parameters the dtype is taken from the slots.
    like = next(iter(old.values()), None) if param is None else param
    grad = rows.as_parameter_dtype(
      grad, like, functools.partial(rows.name_of, treedef, i)
    )
    rate = hyperparameters.cast(step.learning_rate, grad.dtype)
    here = dataclasses.replace(step, learning_rate=rate)
    leaves[i], new = rule(grad, param, old, here)
    for name, array in new.items():
      slot_leaves[name][i] = array
  return jax.tree.unflatten(treedef, leaves), {
    name: jax.tree.unflatten(treedef, arrays)
    for name, arrays in slot_leaves.items()
  }


def power(base: hyperparameters.Scalar) -> ScalarRule:
  """Creates the powers of a number, as TensorFlow keeps them.

  A float32 scalar that starts at ``base`` and is multiplied by it after each
  step, which rounds differently from ``base ** count``.
  """
  return ScalarRule(
    hyperparameters.rounded(base),
    lambda value, step: value * hyperparameters.cast(base, jnp.float32),
  )
