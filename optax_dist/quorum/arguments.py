"""The arguments of a sync-replicas run: constraints and derived numbers."""

from __future__ import annotations

from typing import Any

from optax_dist._internal import checks

#: The largest number, also of steps: states count in 32 bits.
UNBOUNDED = checks.MOST_COUNT


def accepts(local_step: int, global_step: int, max_staleness: int = 0) -> bool:
  """Whether a gradient of `local_step` is fresh enough at `global_step`.

  TensorFlow's accumulators accept `local_step >= global_step`; a positive
  `max_staleness` accepts that many steps less. It does not check for future
  steps: TensorFlow accepts them, the default rules refuse them.

  Example:
    >>> accepts(4, 5), accepts(5, 5), accepts(4, 5, max_staleness=1)
    (False, True, True)
  """
  return local_step >= global_step - max_staleness


def check_sync_arguments(
  replicas_to_aggregate: Any,
  total_num_replicas: Any = None,
  max_staleness: Any = 0,
) -> tuple[int, int | None, int]:
  """Checks the three numbers of a sync-replicas run.

  Args:
    replicas_to_aggregate: gradients that a step takes, a positive integer.
    total_num_replicas: number of replicas, a positive integer, or None if it is
      only known later (the size of an axis).
    max_staleness: the largest accepted staleness, in steps, 0 or more; None for
      no limit.

  Returns:
    The three as plain integers; no limit is `UNBOUNDED`.

  Raises:
    ValueError: one of them is not an integer (a bool is not one either), or out
      of range.

  Example:
    >>> check_sync_arguments(3, None)
    (3, None, 0)
    >>> check_sync_arguments(0, 4)
    Traceback (most recent call last):
    ValueError: `replicas_to_aggregate` must be a positive integer, got 0.
  """
  k = checks.count("replicas_to_aggregate", replicas_to_aggregate)
  n = checks.count_or_none("total_num_replicas", total_num_replicas)
  late = UNBOUNDED if max_staleness is None else max_staleness
  return k, n, checks.count("max_staleness", late, least=0)
