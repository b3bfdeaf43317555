"""Checks of arguments: a mistake is an error when a transformation is created.

Without JAX, which takes seconds to import, unless an array is checked.
"""

import contextlib
import math
import numbers
import operator
import os
from collections.abc import Iterator
from typing import Any

# States count in 32 bits.
MOST_COUNT = 2**31 - 1
# The largest number of float32.
_MOST_NUMBER = float.fromhex("0x1.fffffep127")
_TENSORFLOW_REDUCTIONS = {"weighted_mean": "mean", "weighted_sum": "sum"}


def count(
  name: str, value: Any, *, least: int = 1, most: int = MOST_COUNT
) -> int:
  """Returns an integer as an ``int``; accepts NumPy's integers.

  Raises:
    ValueError: if it is not an integer, less than ``least``, or greater than
      ``most``.
  """
  number = integer(value)
  if number is None or number < least:
    kinds = {0: "an integer, not negative", 1: "a positive integer"}
    kind = kinds.get(least, f"an integer of at least {least}")
    raise ValueError(f"`{name}` must be {kind}, got {value!r:.100}.")
  at_most(name, number, most)
  return number


def integer(value: Any) -> int | None:
  """Returns an integer as an ``int``, and None for any other value.

  Example:
    >>> integer(3), integer(True), integer(3.0)
    (3, None, None)
  """
  if _is_bool(value):
    return None
  try:
    return operator.index(value)
  except TypeError:
    return None


def _is_bool(value: Any) -> bool:
  # Compared by name, since this module must not import NumPy.
  return type(value).__name__ in ("bool", "bool_")


def one_of_numbers(name: str, value: Any, accepted: tuple[int, ...]) -> Any:
  """Returns one of several integers as an ``int``.

  Raises:
    ValueError: if it is something else.
  """
  number = integer(value)
  if number not in accepted:
    *first, last = map(str, accepted)
    raise ValueError(
      f"`{name}` must be {', '.join(first)} or {last}, got {value!r:.100}."
    )
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
    raise ValueError(f"`{name}` must be at most {most}, got {value!r:.100}.")


def flag(name: str, value: Any) -> None:
  """Checks a True or False; other values would be ambiguous.

  Raises:
    ValueError: if it is neither.
  """
  if not _is_bool(value):
    raise ValueError(f"`{name}` must be True or False, got {value!r:.100}.")


def function(name: str, value: Any) -> None:
  """Checks a function.

  Raises:
    ValueError: if it can't be called.
  """
  if not callable(value):
    raise ValueError(f"`{name}` must be a function, got {value!r:.100}.")


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
    ValueError: if it is not a number, not finite in float32, or negative; or if it
      is 0 and must be ``positive``.
  """
  known = value
  if not _is_number(value):
    import jax

    if isinstance(value, jax.core.Tracer):
      return
    _check_scalar_array(name, value)
    known = float(value)
  least = "positive" if positive else "not negative"
  if not 0 <= known <= _MOST_NUMBER or (positive and known == 0):
    raise ValueError(
      f"`{name}` must be finite and {least}, got {value!r:.100}."
    )


def _check_scalar_array(name: str, value: Any) -> None:
  import jax
  import jax.numpy as jnp
  import numpy as np

  is_array = isinstance(value, jax.Array | np.ndarray | np.generic)
  kind = value.dtype if is_array and value.shape == () else None
  if kind is None or not (
    jnp.issubdtype(kind, jnp.floating) or jnp.issubdtype(kind, jnp.integer)
  ):
    raise ValueError(
      f"`{name}` must be a number or a scalar array, got {value!r:.100}."
    )


def _is_number(value: Any) -> bool:
  return isinstance(value, numbers.Real) and not _is_bool(value)


def number(name: str, value: Any, *, infinite: bool = False) -> None:
  """Checks a number of at least 0, which is not an array.

  Raises:
    ValueError: if it is something else, or is infinite and may not be.
  """
  is_number = _is_number(value)
  is_finite = is_number and 0 <= value <= _MOST_NUMBER
  if not is_finite and not (infinite and is_number and value == math.inf):
    kind = "number" if infinite else "finite number"
    raise ValueError(
      f"`{name}` must be a {kind} of at least 0, got {value!r:.100}."
    )


def fraction(name: str, value: Any, kind: str = "a number ") -> None:
  """Checks a number from 0 to 1; ``kind`` is its name in the message.

  Raises:
    ValueError: if it is not in this range, or an array.
  """
  if not _is_number(value) or not 0 <= value <= 1:
    raise ValueError(f"`{name}` must be {kind}from 0 to 1, got {value!r:.100}.")


def rate_or_schedule(name: str, value: Any, *, positive: bool = False) -> None:
  """Like :func:`rate`, but also accepts a schedule."""
  if not callable(value):
    rate(name, value, positive=positive)


@contextlib.contextmanager
def structure(name: str, like: str) -> Iterator[None]:
  """Names the argument in JAX's errors about the structure of a tree.

  Raises:
    ValueError: if the block raises a ValueError.

  Example:
    >>> with structure("specs", "`tree`"):
    ...   raise ValueError("Expected list, got 3.")
    Traceback (most recent call last):
    ValueError: `specs` must have the structure of `tree`: Expected list, got 3.
  """
  try:
    yield
  except ValueError as error:
    raise ValueError(
      f"`{name}` must have the structure of {like}: {error}"
    ) from error


def transformation(name: str, value: Any) -> None:
  """Checks for an optax transformation, or an object that is used like one.

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
