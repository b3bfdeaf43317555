"""Checks of arguments: a mistake is an error when a transformation is created."""

import math
import operator
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

# States count in 32 bits.
_MOST = 2**31 - 1
_TENSORFLOW_REDUCTIONS = {"weighted_mean": "mean", "weighted_sum": "sum"}


def count(name: str, value: Any, *, least: int = 1, most: int = _MOST) -> int:
  """Returns an integer as an ``int``; accepts NumPy's integers.

  Raises:
    ValueError: if it is not an integer, less than ``least``, which is 1 or 0, or
      greater than ``most``.
  """
  try:
    number = operator.index(value)
  except TypeError:
    number = least - 1
  if isinstance(value, bool | np.bool_) or number < least:
    kind = "a positive integer" if least else "an integer, not negative"
    raise ValueError(f"`{name}` must be {kind}, got {value!r}.")
  at_most(name, number, most)
  return number


def count_or_none(name: str, value: Any) -> int | None:
  """Like :func:`count`, but also accepts None."""
  return None if value is None else count(name, value)


def at_most(name: str, value: float, most: float) -> None:
  """Checks a number against a bound.

  Raises:
    ValueError: if it is greater.
  """
  if value > most:
    raise ValueError(f"`{name}` must be at most {most}, got {value}.")


def flag(name: str, value: Any) -> None:
  """Checks a True or False; other values would be ambiguous.

  Raises:
    ValueError: if it is neither.
  """
  if not isinstance(value, bool | np.bool_):
    raise ValueError(f"`{name}` must be True or False, got {value!r}.")


def kind(name: str, value: Any, kinds: Any, what: str) -> None:
  """Checks the type of an argument; ``what`` says in the message what it must be.

  Raises:
    ValueError: if it is of another type.

  Example:
    >>> kind("run", 3, str, "a name")
    Traceback (most recent call last):
    ValueError: `run` must be a name, got 3.
  """
  if not isinstance(value, kinds):
    raise ValueError(f"`{name}` must be {what}, got {value!r:.100}.")


def path(name: str, value: Any) -> None:
  """Checks a path of the file system, which is not empty.

  Raises:
    ValueError: if it is none.
  """
  kind(name, value, str | os.PathLike, "a path")
  if not os.fspath(value):
    raise ValueError(f"`{name}` must be a path, got {value!r}.")


def rate(name: str, value: Any, *, positive: bool = False) -> None:
  """Checks a number or a scalar array; traced values are not checked.

  Raises:
    ValueError: if it is not a number, not finite, or negative; or if it is 0 and
      must be ``positive``.
  """
  if isinstance(value, jax.core.Tracer):
    return
  kind = "positive" if positive else "not negative"
  is_number = isinstance(value, int | float | np.number) or (
    isinstance(value, jax.Array | np.ndarray)
    and value.shape == ()
    and jnp.issubdtype(value.dtype, jnp.number)
  )
  if not is_number or isinstance(value, bool) or np.iscomplexobj(value):
    raise ValueError(
      f"`{name}` must be a number or a scalar array, got {value!r}."
    )
  number = float(value)
  if not math.isfinite(number) or number < 0 or (positive and number == 0):
    raise ValueError(f"`{name}` must be finite and {kind}, got {value!r}.")


def fraction(name: str, value: Any, kind: str = "") -> None:
  """Checks a number from 0 to 1; ``kind`` is its name in the message.

  Raises:
    ValueError: if it is not in this range.
  """
  is_number = isinstance(value, int | float | np.number)
  if not is_number or isinstance(value, bool) or not 0 <= value <= 1:
    raise ValueError(f"`{name}` must be {kind}from 0 to 1, got {value!r}.")


def rate_or_schedule(name: str, value: Any, *, positive: bool = False) -> None:
  """Like :func:`rate`, but also accepts a schedule."""
  if not callable(value):
    rate(name, value, positive=positive)


def transformation(name: str, value: Any) -> None:
  """Checks for an optax transformation, or what is used like one.

  Raises:
    ValueError: if it is something else.
  """
  methods = (getattr(value, name, None) for name in ("init", "update"))
  if not all(map(callable, methods)):
    remedy = " Call it: optax.sgd(0.1), not optax.sgd." * callable(value)
    raise ValueError(
      f"`{name}` must be an optax.GradientTransformation, got {value!r}.{remedy}"
    )


def reduction(value: Any, accepted: tuple[str, ...]) -> str:
  """Returns how to reduce, one of several words.

  Also accepts TensorFlow's names for a mean and a sum, the values of
  ``tf.compat.v1.losses.Reduction.MEAN`` and ``SUM``.

  Raises:
    ValueError: if it is something else.

  Example:
    >>> reduction("weighted_sum", ("mean", "sum"))
    'sum'
  """
  if isinstance(value, str):
    value = _TENSORFLOW_REDUCTIONS.get(value, value)
  one_of("reduction", value, accepted)
  return value


def one_of(name: str, value: Any, accepted: tuple[str | None, ...]) -> None:
  """Checks that an argument is one of several words, or None if that is accepted.

  Raises:
    ValueError: if it is not.
  """
  # An array would be compared number by number.
  is_word = value is None or isinstance(value, str)
  if not is_word or value not in accepted:
    words = ", ".join(map(repr, accepted))
    raise ValueError(f"`{name}` must be one of {words}, got {value!r:.100}.")
