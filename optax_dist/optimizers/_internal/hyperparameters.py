"""Hyperparameters rounded as in TensorFlow's kernels: float32, then cast."""

import inspect
import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.extend.core import primitives

# A number, a traced scalar (as optax.inject_hyperparams gives), or, for the
# learning rate, also a schedule.
Scalar: TypeAlias = jax.typing.ArrayLike
ScalarOrSchedule: TypeAlias = optax.ScalarOrSchedule


def is_static(value: Any) -> bool:
  """Returns whether a hyperparameter is a number known at construction."""
  return isinstance(value, int | float | np.generic)


def adopting(value: Any) -> Any:
  """Makes a scalar array adopt the dtype of other operands, as numbers do.

  Stock transformations multiply by it without a cast: a float32 decay would
  make the momentum of bfloat16 parameters float32.

  Args:
    value: A number, a scalar array or a schedule.

  Returns:
    An array weakly typed; a number or a schedule unchanged.

  Example:
    >>> jnp.ones(1, jnp.bfloat16) * adopting(jnp.float32(0.5))
    Array([0.5], dtype=bfloat16)
  """
  if is_static(value) or callable(value):
    return value
  array = jnp.asarray(value)
  # The public conversions all return strong types.
  return primitives.convert_element_type_p.bind(
    array, new_dtype=array.dtype, weak_type=True, sharding=None
  )


def rounded(value: Any) -> Any:
  """Rounds a plain number to float32, as TensorFlow does.

  TensorFlow's hyperparameters are float32 tensors, and its kernels compute ``1
  - beta`` from them in float32. For beta = 0.999 the float64 result has a
  relative difference of 1.3e-5, which is visible in trajectories. The difference
  of 1 and a float32 number is exact in Python's floats, so rounding first gives
  the kernel's value in any later arithmetic.

  Args:
    value: A number, an array or a schedule.

  Returns:
    A Python float or, of an array, its value, both weakly typed: they adopt
    other operands' dtypes. A schedule is unchanged.

  Example:
    >>> 1 - rounded(0.999) == float(np.float32(1) - np.float32(0.999))
    True
  """
  return float(np.float32(value)) if is_static(value) else adopting(value)


def cast(value: Any, dtype: Any) -> Any:
  """Casts a hyperparameter to the dtype of the leaf it is applied to.

  Args:
    value: A number or a scalar array.
    dtype: The leaf's dtype.

  Returns:
    A weakly typed Python float for a number, otherwise the array in ``dtype``.
  """
  return rounded(value) if is_static(value) else jnp.asarray(value, dtype)


def complement(value: Any, dtype: Any) -> Any:
  """Returns 1 minus a hyperparameter, in the dtype of the leaf it is applied to.

  It is computed before the cast: in bfloat16 0.999 is 1, and 1 minus that is 0.

  Args:
    value: A number or a scalar array.
    dtype: The leaf's dtype.

  Example:
    >>> complement(jnp.float32(0.999), jnp.bfloat16)
    Array(0.000999451, dtype=bfloat16)
  """
  if is_static(value):
    return 1 - rounded(value)
  return (1 - jnp.asarray(value, wide_dtype(dtype))).astype(dtype)


def wide_dtype(dtype: Any) -> Any:
  """The dtype for an optimizer's scalars: float32, or float64 if that is wider.

  bfloat16 has 8 bits: 0.999 would round to 1, and 1 - beta2 to 0.
  """
  wide = (jnp.float64, jnp.complex128)
  return jnp.float64 if dtype in wide else jnp.float32


def in_wide_dtype(value: Any, dtype: Any) -> jax.Array:
  """Casts a learning rate to the dtype for scalars, see :func:`wide_dtype`.

  Args:
    value: A number or a scalar array; in the dtype of the leaf it may be complex,
      without an imaginary part.
    dtype: The leaf's dtype.

  Returns:
    A real scalar array.
  """
  return jnp.asarray(jnp.real(value), wide_dtype(dtype))


def check_learning_rate(value: Any) -> None:
  """Checks a learning rate as far as its value is known.

  Args:
    value: A finite number, a scalar array or a schedule.

  Raises:
    TypeError: If it is none of these, or a function of anything but the step.
    ValueError: If it is a number or an array that is not finite, or an array
      with dimensions.
  """
  if not callable(value):
    kinds = "a finite number, a scalar array or a schedule"
    _check_number("learning_rate", value, kinds)
    return
  try:
    signature = inspect.signature(value)
  except ValueError:  # A builtin may have none.
    return
  try:
    signature.bind(0)
  except TypeError:
    raise TypeError(
      "learning_rate must be a number or a schedule, a function of the step alone,"
      f" got a function with the arguments {signature}. RETURNN's"
      " dynamic_learning_rate is an option in the configuration that"
      " from_returnn_config takes"
    ) from None


def checked_rate(value: ScalarOrSchedule) -> ScalarOrSchedule:
  """Checks a learning rate, and rounds it; see :func:`rounded`.

  So it also suits optax's transformations, for leaves of any dtype: they multiply
  by it without a cast.

  Example:
    >>> rate = optax.scale_by_learning_rate(checked_rate(jnp.float32(0.5)))
    >>> rate.update(jnp.ones(1, jnp.bfloat16), rate.init(None))[0]
    Array([-0.5], dtype=bfloat16)
  """
  check_learning_rate(value)
  return rounded(value)


def divided(
  learning_rate: ScalarOrSchedule, divisor: Callable[[jax.Array], Any]
) -> Callable[[Any], jax.Array]:
  """Creates a schedule of a learning rate divided by a function of the step.

  Args:
    learning_rate: A number, a scalar array or a schedule.
    divisor: Takes the number of steps before this one, as float32, or float64
      for a float64 learning rate.

  Returns:
    The schedule.

  Example:
    >>> schedule = divided(0.5, lambda count: 1 + count)
    >>> float(schedule(jnp.int32(1)))
    0.25
  """

  def schedule(count):
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    wide = wide_dtype(jnp.asarray(rate).dtype)
    return jnp.asarray(rate, wide) / divisor(jnp.asarray(count, wide))

  return schedule


def check_numbers(**values: Any) -> None:
  """Checks other hyperparameters as far as their values are known.

  Args:
    **values: Finite numbers or scalar arrays.

  Raises:
    TypeError: If one is neither.
    ValueError: If one is not finite, or an array with dimensions.
  """
  for name, value in values.items():
    _check_number(name, value, "a finite number or a scalar array")


def _check_number(name: str, value: Any, kinds: str) -> None:
  dtype = _dtype_of(value)
  if jnp.issubdtype(dtype, jnp.complexfloating):
    raise TypeError(
      f"{name} must be {kinds}, got one of dtype {dtype}. For complex parameters, give"
      " optax.inject_hyperparams a real `hyperparam_dtype`"
    )
  if dtype is None or not (
    jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)
  ):
    raise TypeError(f"{name} must be {kinds}, got {value!r:.100}")
  if np.ndim(value):
    raise ValueError(
      f"{name} must be {kinds}, got an array of shape {np.shape(value)}"
    )
  known = _known(value)
  # A plain number is rounded to float32.
  most = float(np.finfo(np.float32).max) if is_static(value) else math.inf
  if known is not None and not (abs(known) <= most and math.isfinite(known)):
    raise ValueError(f"{name} must be {kinds}, got {value!r:.100}")


def _dtype_of(value: Any) -> Any:
  """The dtype of a hyperparameter; None of what can't be one."""
  if isinstance(value, int):
    return None if isinstance(value, bool) else np.dtype(np.int64)
  if isinstance(value, jax.Array):
    return value.dtype
  is_number = isinstance(value, float | np.generic | np.ndarray)
  return np.asarray(value).dtype if is_number else None


def _known(value: Any) -> Any:
  """The number in a hyperparameter; None if it is traced, or a schedule."""
  if isinstance(value, jax.core.Tracer) or callable(value):
    return None
  # An integer may be larger than any float.
  return value if isinstance(value, int) else float(value)


def check(
  name: str, value: Any, holds: Callable[[Any], bool], constraint: str
) -> None:
  """Checks a hyperparameter as far as its value is known.

  Args:
    name: The argument's name.
    value: A number, a scalar array or a schedule.
    holds: Returns whether a number is valid.
    constraint: Describes the valid numbers.

  Raises:
    ValueError: If it is not valid.
  """
  known = _known(value)
  if known is not None and not holds(known):
    raise ValueError(f"{name} must be {constraint}, got {value}")


def check_positive(**values: Any) -> None:
  """Checks that they are numbers, and > 0; see :func:`check`."""
  check_numbers(**values)
  for name, value in values.items():
    check(name, value, lambda x: x > 0, "positive")


def check_not_negative(**values: Any) -> None:
  """Checks that they are numbers, and >= 0; see :func:`check`."""
  check_numbers(**values)
  for name, value in values.items():
    check(name, value, lambda x: x >= 0, "positive or zero")
