"""Learning rates for steps with a varying number of samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

# As in optax: from the number of updates so far to a number.
Schedule = Callable[[Any], Any]


def scaled_by_batch(
  learning_rate: float | Schedule,
  global_batch: int | Schedule,
  reference: int,
  rule: Literal["linear", "square_root"] = "linear",
) -> Schedule:
  """A learning rate that depends on the number of samples in a step.

  For runs whose global batch is not constant: with fewer replicas, or growing
  by a schedule. With `Batches.deterministic` no scaling is needed.

  Args:
    learning_rate: the rate for `reference` samples in a step: a number or a
      schedule.
    global_batch: samples in a step: a number, or a schedule of them.
    reference: samples in a step for which `learning_rate` was chosen.
    rule: "linear": k times the samples, k times the rate (Goyal et al.,
      Accurate, Large Minibatch SGD, 2017); "square_root": its square root
      (Krizhevsky, One weird trick, 2014; for Adam, Malladi et al., 2022).

  Returns:
    An optax schedule.

  Raises:
    ValueError: `learning_rate` or `global_batch` is neither a schedule nor a
      finite number (positive for the batch), `reference` is not positive, or
      the rule is unknown.

  Example:
    >>> rate = scaled_by_batch(0.1, 512, reference=256)
    >>> round(rate(0), 6)
    0.2
    >>> rate = scaled_by_batch(0.1, 1024, reference=256, rule="square_root")
    >>> round(rate(0), 6)
    0.2
  """
  _check("learning_rate", learning_rate, positive=False)
  _check("global_batch", global_batch, positive=True)
  if reference < 1:
    raise ValueError(f"reference must be a positive number, got {reference!r}.")
  if rule not in ("linear", "square_root"):
    raise ValueError(f"rule must be 'linear' or 'square_root', got {rule!r}.")
  power = 1.0 if rule == "linear" else 0.5

  def schedule(count: Any) -> Any:
    rate = learning_rate(count) if callable(learning_rate) else learning_rate
    samples = global_batch(count) if callable(global_batch) else global_batch
    return rate * (samples / reference) ** power

  return schedule


def _check(name: str, value: Any, positive: bool) -> None:
  # Without JAX, which this package doesn't load: arrays pass as they are.
  if callable(value) or hasattr(value, "dtype"):
    return
  is_number = isinstance(value, int | float) and not isinstance(value, bool)
  if not is_number or not 0 <= value < math.inf or (positive and not value):
    kind = "positive" if positive else "not negative"
    raise ValueError(
      f"{name} must be a schedule or a number, finite and {kind}, got {value!r}."
    )
