"""Whether the data of a run fits its other arguments."""

from __future__ import annotations

import types
from typing import Any

import numpy as np

from optax_dist import ledger
from optax_dist.coordinator import strategies
from optax_dist.coordinator.data.probe import Probe


def gradients_per_step(
  data: Any, replicas: int, requested: int | None, default: int, strategy: Any
) -> int:
  """How many gradients a step takes.

  Args:
    data: the samples that are leased; deterministic data determines the number.
    replicas: the number of replicas.
    requested: the number that the caller chose; None for none.
    default: the number if the caller chose none.
    strategy: the strategy that the caller chose; None for sync replicas.

  Raises:
    ValueError: the data needs another number, or no strategy.
  """
  k = default if requested is None else requested
  if not isinstance(data, ledger.Batches):
    return k
  if data.deterministic:
    if strategy is not None:
      raise ValueError(
        "deterministic=True can't be combined with strategy=: replicas have states"
        " of their own there, which depend on who computed what."
      )
    if requested not in (None, data.slots):
      raise ValueError(
        "replicas_to_aggregate follows from data with deterministic=True, and is"
        f" {data.slots} here: a step takes all of its micro-batches. Got"
        f" {requested!r}."
      )
    return data.slots
  if isinstance(k, int | np.integer) and k > replicas and k % replicas:
    raise ValueError(
      "replicas_to_aggregate must be at most the number of replicas"
      f" ({replicas}), or a multiple of it, where samples are leased (data=);"
      f" got {k}: each replica would sum {-(-k // replicas)} gradients, and a"
      " step have more samples than global_batch. For another number use"
      " Batches(micro_batch=..., deterministic=True)."
    )
  return k


def samples_per_gradient(data: Any, strategy: strategies.Strategy) -> int:
  """How many samples a gradient, or local step, is computed on.

  Args:
    data: the samples that are leased; None for none.
    strategy: the strategy of the run.

  Returns:
    The number; 0 if none are leased.

  Raises:
    ValueError: a step does not have as many samples for each.
  """
  if data is None:
    return 0
  unit: int = data.unit(strategy.quorum.replicas_to_aggregate)
  period = strategy.period
  assert period is not None
  if unit % period:
    steps = data.global_batch // unit * period
    raise ValueError(
      f"global_batch must be a multiple of the {steps} local steps of a round"
      f" (communication_period is {period}), got {data.global_batch}."
    )
  return unit // period


def check_probe(
  probe: Probe | types.EllipsisType | None, data: Any
) -> Probe | None:
  """The probe; None for none.

  Raises:
    ValueError: it is missing, or there is nothing to probe.
    TypeError: it is no function.
  """
  deterministic = isinstance(data, ledger.Batches) and data.deterministic
  if isinstance(probe, types.EllipsisType):
    if deterministic:
      raise ValueError(
        "deterministic data needs probe=, a function of parameters and a"
        " micro-batch (Slot) that returns a gradient: replicas that would compute"
        " other bits are found by it. Pass probe=None to go without."
      )
    return None
  if probe is not None and not callable(probe):
    raise TypeError(f"probe must be a function or None, got {probe!r:.100}.")
  if probe is not None and not deterministic:
    raise ValueError(
      "probe= is for data=Batches(..., deterministic=True): other runs don't"
      " promise equal bits."
    )
  return probe


def check(
  data: Any,
  progress: Any,
  strategy: strategies.Strategy,
  step: int,
  processes: int = 1,
) -> None:
  """Refuses invalid data, and data that the strategy can't use.

  Args:
    data: the samples that are leased.
    progress: the progress of a checkpoint, as `ledger.Progress`.
    strategy: the strategy of the run.
    step: the step of the checkpoint.
    processes: the number of processes of each replica.

  Raises:
    TypeError, ValueError: the message says what is refused, and why.
  """
  for name, value, kind in (
    ("data", data, ledger.Batches),
    ("progress", progress, ledger.Progress),
  ):
    if value is not None and not isinstance(value, kind):
      raise TypeError(f"{name} must be a {kind.__name__}, got {value!r:.100}.")
  if progress is not None:
    try:
      progress.check(data)
    except ValueError as error:
      raise ValueError(f"progress is of no run of this data: {error}") from None
  if data is None:
    if progress is not None:
      raise ValueError(
        "progress= is of a run whose samples were leased, and data= is missing: give"
        " the same data, or leave progress out to read other data."
      )
    return
  if strategy.period is None:
    raise ValueError(
      f"data= is not for the strategy {strategy.name!r}: a sample would be in"
      " several steps, one for each fragment. Each learner has data of its own"
      " there."
    )
  if not data.deterministic:
    return
  # Settings that would make parameters depend on which replica computed which samples.
  numbers = strategy.quorum
  for refused, what in (
    (
      numbers.max_staleness > 0,
      f"max_staleness={numbers.max_staleness}: what is stale depends on who is"
      " slow",
    ),
    (
      numbers.weight is not None,
      "staleness_weight: all micro-batches of a step count alike",
    ),
  ):
    if refused:
      raise ValueError(f"deterministic=True can't be combined with {what}.")
  if data.audit and processes > 1:
    raise ValueError(
      "audit= compares gradients of replicas of one process: here each process"
      " has a part of them. Leave it out."
    )
  progress = progress or ledger.NOTHING_DONE
  if progress != ledger.Progress(step * data.global_batch):
    raise ValueError(
      f"deterministic=True needs the progress of its checkpoint: step {step}"
      f" begins at position {step * data.global_batch} of the data, and {progress}"
      " is done."
    )
