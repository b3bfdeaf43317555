"""The optimizers that ``optax-dist train`` offers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:  # Slow to import: see optax_dist.cli.
  import optax

DEFAULT_LEARNING_RATES = {"adam": 0.003, "momentum": 0.2, "sgd": 0.5}
"""Of each optimizer: one that trains the digits well."""


def names() -> list[str]:
  """The names of all optimizers."""
  return sorted(DEFAULT_LEARNING_RATES)


def make(
  name: str, learning_rate: float, steps: int
) -> optax.GradientTransformation:
  """Makes an optimizer whose learning rate falls to 0 along a half cosine.

  Args:
    name: one of :func:`names`.
    learning_rate: that of the first step.
    steps: the number of steps until the learning rate is 0.

  Returns:
    The optimizer.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = make("sgd", 0.1, steps=100)
    >>> optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)))[0]
    Array([-0.1, -0.1], dtype=float32)
  """
  import jax.numpy as jnp
  import optax

  cosine = optax.cosine_decay_schedule(learning_rate, steps)

  def schedule(count):
    # Optax's schedule does not promote the integer count under strict rules.
    return cosine(jnp.asarray(count, jnp.float32))

  if name == "adam":
    return optax.adam(schedule)
  if name == "momentum":
    return optax.sgd(schedule, momentum=0.9)
  if name == "sgd":
    return optax.sgd(schedule)
  raise ValueError(f"`name` must be one of {names()}, got {name!r}.")
