"""A base for one's own optimizer: give it an apply rule for one leaf."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from optax_dist.optimizers._internal import hyperparameters, row_wise
from optax_dist.sparse import indexed_slices


@dataclasses.dataclass(frozen=True)
class Step:
  """What an apply rule knows of the step it is in.

  Attributes:
    learning_rate: This step's learning rate, a number or an array of the leaf's
      dtype.
    count: Steps before this one, an int32 scalar.
    scalars: The optimizer's own scalars, float32, as they were before this
      step.
    extra_args: Further arguments of ``update``.
  """

  learning_rate: Any
  count: jax.Array
  scalars: dict[str, jax.Array]
  extra_args: dict[str, Any]


class CustomState(NamedTuple):
  """State of an optimizer made by :func:`base_custom`.

  Attributes:
    count: Steps so far, an int32 scalar.
    scalars: Scalars of the optimizer as a whole by name, float32 (TensorFlow's
      "non-slot variables", such as ``beta1_power``).
    slots: Trees like the parameters by name, in the parameters' dtypes.
  """

  count: jax.Array  # type: ignore[assignment]
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
  """How a scalar of an optimizer as a whole begins and goes on.

  Attributes:
    initial: Its value at step 0.
    advance: Gives the next value of the value and the :class:`Step`.
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
  """Makes an optimizer of a rule for one leaf.

  Args:
    apply_rule: Takes the gradient of one leaf, the leaf (``None`` where
      ``update`` was called without parameters), its slots by name and the
      :class:`Step`, and returns the update, to be added to the leaf, and the
      new slots. All arrays have the leaf's shape and dtype.
    learning_rate: A number, a scalar array or a schedule of the step count.
    slots: Initial values of the slots by name.
    scalars: Scalars of the optimizer as a whole by name.
    sparse_apply_rule: As ``apply_rule``, for a sparse gradient: gets an
      :class:`~optax_dist.IndexedSlices` and the whole leaf and slots, and
      returns the update dense or sparse. Without it, the ``apply_rule`` sees
      the touched rows alone, with the same rows of the leaf and of its slots.
    sum_duplicates: Whether to add up repeated indices before either rule sees
      them. The original does not: each repetition is a row of its own, its
      updates add up, and of its slots one, unspecified, stays.
    needs_params: Whether the rule reads the leaf.

  Returns:
    A transformation with a :class:`CustomState`. A ``None`` gradient leaves
    its leaf and slots as they are. ``update`` raises a ``ValueError`` if it is
    called without parameters and the rule needs them.

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
  slots = dict(slots or {})
  scalars = dict(scalars or {})

  def init_fn(params):
    return CustomState(
      count=jnp.zeros([], jnp.int32),
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
    if needs_params and params is None:
      raise ValueError(
        "this optimizer reads the parameters: call update(grads, state, params)"
      )
    rate = learning_rate
    if callable(rate):
      rate = rate(state.count)
    step = Step(rate, state.count, state.scalars, extra_args)
    leaves, treedef = row_wise.flatten_gradients(updates)
    if params is None:
      param_leaves = [None] * len(leaves)
    else:
      param_leaves = treedef.flatten_up_to(params)
    slot_leaves = {
      name: treedef.flatten_up_to(tree) for name, tree in state.slots.items()
    }
    for i, (grad, param) in enumerate(zip(leaves, param_leaves, strict=True)):
      if grad is None:
        continue
      old = {name: arrays[i] for name, arrays in slot_leaves.items()}
      # Without parameters the slots tell their dtype.
      like = next(iter(old.values()), None) if param is None else param
      grad = row_wise.as_parameter_dtype(grad, like)
      here = dataclasses.replace(
        step, learning_rate=hyperparameters.cast(rate, grad.dtype)
      )
      if indexed_slices.is_indexed_slices(grad):
        # Only with a sparse_apply_rule: else row_wise has made rows of it.
        assert sparse_apply_rule is not None
        if sum_duplicates:
          grad = indexed_slices.sum_duplicates(grad)
        leaves[i], new = sparse_apply_rule(grad, param, old, here)
      else:
        leaves[i], new = apply_rule(grad, param, old, here)
      for name, array in new.items():
        slot_leaves[name][i] = array
    state = CustomState(
      count=optax.safe_increment(state.count),
      scalars={
        name: scalars[name].advance(value, step)
        for name, value in state.scalars.items()
      },
      slots={
        name: jax.tree.unflatten(treedef, arrays)
        for name, arrays in slot_leaves.items()
      },
    )
    return jax.tree.unflatten(treedef, leaves), state

  transformation = optax.GradientTransformationExtraArgs(init_fn, update_fn)
  if sparse_apply_rule is not None:
    return transformation
  return row_wise.row_wise(transformation, sum_duplicates=sum_duplicates)


def power(base: hyperparameters.Scalar) -> ScalarRule:
  """Gives the powers of a number, as TensorFlow keeps them.

  A float32 scalar that begins as ``base`` and is multiplied by it after each
  step, which rounds otherwise than ``base ** count``.
  """
  return ScalarRule(
    hyperparameters.rounded(base),
    lambda value, step: value * hyperparameters.cast(base, jnp.float32),
  )
