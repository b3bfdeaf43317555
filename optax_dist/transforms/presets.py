"""Variants of local updates by their papers' names, with their defaults."""

from collections.abc import Callable
from typing import Any, Literal

import optax

from optax_dist._internal import axes, checks
from optax_dist.compression.top_k import top_k
from optax_dist.transforms.local_updates import local_updates

Period = int | Callable[[Any], Any]


def local_sgd(
  inner: optax.GradientTransformation,
  axis_name: axes.AxisNames,
  *,
  communication_period: Period,
  **kwargs: Any,
) -> optax.GradientTransformationExtraArgs:
  """All replicas continue from the mean of their parameters.

  :func:`optax_dist.local_updates` with ``outer=optax.sgd(1.0)``.

  Args:
    inner: the transformation that updates each replica's parameters.
    axis_name: see ``local_updates``, like all others.
    communication_period: steps in a round, or a schedule of them.
    **kwargs: further arguments of ``local_updates``, such as ``num_replicas``.

  Returns:
    A transformation as from ``local_updates``, which also lists the errors.

  Example:
    >>> import optax, optax_dist
    >>> tx = optax_dist.local_sgd(optax.sgd(0.1), "data", communication_period=8)

  References:
    Stich 2018, `Local SGD Converges Fast and Communicates Little
    <https://arxiv.org/abs/1805.09767>`_.
  """
  outer = optax.sgd(1.0)
  return local_updates(
    inner, outer, axis_name, communication_period=communication_period, **kwargs
  )


def diloco(
  inner: optax.GradientTransformation,
  axis_name: axes.AxisNames,
  *,
  communication_period: Period = 500,
  outer_learning_rate: optax.ScalarOrSchedule = 0.7,
  outer_momentum: float = 0.9,
  **kwargs: Any,
) -> optax.GradientTransformationExtraArgs:
  """Local steps with Nesterov momentum over the rounds; the paper uses AdamW.

  Args:
    inner: the transformation that updates each replica's parameters, such as
      ``optax.adamw(4e-4)``.
    axis_name: see :func:`optax_dist.local_updates`, like all others.
    communication_period: steps in a round, or a schedule of them.
    outer_learning_rate: learning rate of a round; a schedule counts rounds.
    outer_momentum: momentum of a round.
    **kwargs: further arguments of ``local_updates``, such as ``num_replicas``.

  Returns:
    A transformation as from ``local_updates``, which also lists the errors.

  Example:
    >>> import optax, optax_dist
    >>> tx = optax_dist.diloco(optax.adamw(4e-4), "data")

  References:
    Douillard et al. 2023, `DiLoCo: Distributed Low-Communication Training of
    Language Models <https://arxiv.org/abs/2311.08105>`_.
  """
  checks.rate_or_schedule("outer_learning_rate", outer_learning_rate)
  checks.fraction("outer_momentum", outer_momentum)
  outer = optax.sgd(outer_learning_rate, outer_momentum, nesterov=True)
  return local_updates(
    inner, outer, axis_name, communication_period=communication_period, **kwargs
  )


def sparse_loco(
  inner: optax.GradientTransformation,
  axis_name: axes.AxisNames,
  *,
  communication_period: Period = 30,
  outer_learning_rate: optax.ScalarOrSchedule = 1.0,
  density: float = 0.03,
  bits: Literal[32, 8, 4, 2] = 2,
  error_feedback: float | None = 0.95,
  **kwargs: Any,
) -> optax.GradientTransformationExtraArgs:
  """Sends the largest few percent of each round's change, in two bits each.

  Each replica keeps what it did not send, with decay, and adds it to its next
  round; this replaces the momentum of DiLoCo's outer step.

  Args:
    inner: the transformation that updates each replica's parameters, such as
      ``optax.adamw(4e-4)``.
    axis_name: see :func:`optax_dist.local_updates`, like all others.
    communication_period: steps in a round, or a schedule of them.
    outer_learning_rate: learning rate of a round; a schedule counts rounds.
    density: the fraction of numbers to send, see
      :func:`optax_dist.compression.top_k`.
    bits: bits of each number.
    error_feedback: the decay of what was not sent; None for no error feedback.
    **kwargs: further arguments of ``local_updates``, such as ``num_replicas``.

  Returns:
    A transformation as from ``local_updates``, which also lists the errors.

  Example:
    >>> import optax, optax_dist
    >>> tx = optax_dist.sparse_loco(optax.adamw(4e-4), "data")

  References:
    Sarfi et al. 2025, `Communication Efficient LLM Pre-training with SparseLoCo
    <https://arxiv.org/abs/2508.15706>`_.
  """
  checks.rate_or_schedule("outer_learning_rate", outer_learning_rate)
  return local_updates(
    inner,
    optax.sgd(outer_learning_rate),
    axis_name,
    communication_period=communication_period,
    compression=top_k(density, bits=bits, error_feedback=error_feedback),
    **kwargs,
  )


def slowmo(
  inner: optax.GradientTransformation,
  axis_name: axes.AxisNames,
  *,
  communication_period: Period = 12,
  slow_learning_rate: optax.ScalarOrSchedule = 1.0,
  slow_momentum: float = 0.7,
  **kwargs: Any,
) -> optax.GradientTransformationExtraArgs:
  """Heavy-ball momentum over the rounds.

  The paper divides the rounds' steps by the inner learning rate before they are
  accumulated, and multiplies by it afterwards. If that rate is constant this
  cancels, so it is omitted here.

  Args:
    inner: the transformation that updates each replica's parameters.
    axis_name: see :func:`optax_dist.local_updates`, like all others.
    communication_period: steps in a round, or a schedule of them.
    slow_learning_rate: learning rate of a round; a schedule counts rounds.
    slow_momentum: momentum of a round.
    **kwargs: further arguments of ``local_updates``. Each replica maintains its
      buffers, as the paper calls it.

  Returns:
    A transformation as from ``local_updates``, which also lists the errors.

  Example:
    >>> import optax, optax_dist
    >>> tx = optax_dist.slowmo(optax.sgd(0.1, momentum=0.9), "data")

  References:
    Wang, Tantia, Ballas and Rabbat 2019, `SlowMo: Improving
    Communication-Efficient Distributed SGD with Slow Momentum
    <https://arxiv.org/abs/1910.00643>`_.
  """
  checks.rate_or_schedule("slow_learning_rate", slow_learning_rate)
  checks.fraction("slow_momentum", slow_momentum)
  outer = optax.sgd(slow_learning_rate, slow_momentum)
  return local_updates(
    inner, outer, axis_name, communication_period=communication_period, **kwargs
  )


def bmuf(
  inner: optax.GradientTransformation,
  axis_name: axes.AxisNames,
  *,
  communication_period: Period,
  num_replicas: int,
  block_learning_rate: optax.ScalarOrSchedule = 1.0,
  block_momentum: float | None = None,
  nesterov: bool = True,
  **kwargs: Any,
) -> optax.GradientTransformationExtraArgs:
  """Blockwise model-update filtering.

  Args:
    inner: the transformation that updates each replica's parameters.
    axis_name: see :func:`optax_dist.local_updates`, like all others.
    communication_period: steps in a round (a block), or a schedule of them.
    num_replicas: the number of replicas.
    block_learning_rate: learning rate of a round; a schedule counts rounds.
    block_momentum: momentum of a round; None for ``1 - 1 / num_replicas``.
    nesterov: whether replicas continue from where the momentum will take them.
    **kwargs: further arguments of ``local_updates``.

  Returns:
    A transformation as from ``local_updates``, which also lists the errors.

  Example:
    >>> import optax, optax_dist
    >>> tx = optax_dist.bmuf(
    ...   optax.sgd(0.1), "data", communication_period=16, num_replicas=8
    ... )

  References:
    Chen and Huo 2016, Scalable Training of Deep Learning Machines by Incremental
    Block Training with Intra-block Parallel Optimization and Blockwise
    Model-Update Filtering, ICASSP.
  """
  checks.count("num_replicas", num_replicas)
  checks.flag("nesterov", nesterov)
  checks.rate_or_schedule("block_learning_rate", block_learning_rate)
  if block_momentum is None:
    block_momentum = 1.0 - 1.0 / num_replicas
  checks.fraction("block_momentum", block_momentum)
  return local_updates(
    inner,
    optax.sgd(block_learning_rate, momentum=block_momentum, nesterov=nesterov),
    axis_name,
    communication_period=communication_period,
    num_replicas=num_replicas,
    **kwargs,
  )
