"""How many tokens TensorFlow enqueues."""

from __future__ import annotations


def tokens_per_step(total_num_replicas: int, replicas_to_aggregate: int) -> int:
  """How many tokens TensorFlow's leader (its chief) enqueues after each step.

  Example:
    >>> tokens_per_step(5, 2), tokens_per_step(2, 5)
    (5, 5)
  """
  return max(total_num_replicas, replicas_to_aggregate)


def initial_tokens(
  num_tokens: int, replicas_to_aggregate: int, total_num_replicas: int
) -> int:
  """How many tokens TensorFlow's `get_init_tokens_op(num_tokens)` enqueues.

  Args:
    num_tokens: the requested number; -1 means `replicas_to_aggregate`.
    replicas_to_aggregate: gradients that a step takes.
    total_num_replicas: number of replicas.

  Returns:
    The number of tokens, 0 or more.

  Raises:
    ValueError: with too few tokens for the first step to finish.

  Example:
    >>> initial_tokens(-1, 2, 5), initial_tokens(-2, 2, 5)
    (2, 0)
    >>> initial_tokens(0, 3, 2)
    Traceback (most recent call last):
    ValueError: Too few tokens to finish the first step: 0 (given) vs 1 (needed)
  """
  if num_tokens == -1:
    return replicas_to_aggregate
  needed = replicas_to_aggregate - total_num_replicas
  if num_tokens < needed:
    raise ValueError(
      "Too few tokens to finish the first step: "
      f"{num_tokens} (given) vs {needed} (needed)"
    )
  return max(num_tokens, 0)
