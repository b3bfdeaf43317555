"""The optimizers that ``optax-dist train`` offers by name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from optax_dist.cli import errors

if TYPE_CHECKING:  # Slow to import: see optax_dist.cli.
  import optax

DEFAULT = "adam"
LEARNING_RATES = {"adam": 0.003, "gradient_descent": 0.5, "momentum": 0.2}
"""Of some optimizers: one that trains the digits well."""
OTHER_LEARNING_RATE = 0.01


def default_learning_rate(name: str) -> float:
  """The default learning rate of an optimizer."""
  return LEARNING_RATES.get(name, OTHER_LEARNING_RATE)


def check(name: str) -> None:
  """Raises :class:`errors.CommandError` if the optimizer is unknown."""
  from optax_dist import optimizers

  if name not in optimizers.REGISTRY:
    raise errors.CommandError(
      f"--optimizer {name!r} is not one of {', '.join(optimizers.REGISTRY)}"
    )


def make(
  name: str, learning_rate: float, steps: int
) -> optax.GradientTransformation:
  """Creates an optimizer with a cosine decay of its learning rate to 0.

  Args:
    name: a key of :data:`optax_dist.optimizers.REGISTRY`.
    learning_rate: the initial learning rate.
    steps: number of steps until the learning rate is 0.

  Returns:
    The optimizer.

  Raises:
    ValueError: if there is no optimizer of that name.

  Example:
    >>> import jax.numpy as jnp
    >>> optimizer = make("gradient_descent", 0.1, steps=100)
    >>> optimizer.update(jnp.ones(2), optimizer.init(jnp.ones(2)))[0]
    Array([-0.1, -0.1], dtype=float32)
  """
  import jax.numpy as jnp
  import optax

  from optax_dist import optimizers

  cosine = optax.cosine_decay_schedule(learning_rate, steps)

  def schedule(count):
    # Optax's schedule does not promote the integer count under strict rules.
    return cosine(jnp.asarray(count, jnp.float32))

  return optimizers.by_name(name, schedule)
