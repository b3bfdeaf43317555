"""The training loop, shared by all strategies."""

import collections
import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from optax_dist.cli import errors
from optax_dist.cli.train import digits, model, strategy

_IN_FLIGHT = 2  # Steps dispatched to the devices before waiting for the first.


@dataclasses.dataclass(frozen=True)
class Compiled:
  """A strategy's compiled program; other shapes raise errors.

  Attributes:
    state: the initial state.
    step: from a state and a batch on the mesh to the next state and metrics.
    count_correct: from parameters to how many test images they classify correctly.
    count_correct_by_replica: the same for each replica's parameters, to a list; or
      None.
  """

  state: Any
  step: Any
  count_correct: Any
  count_correct_by_replica: Any = None


def compile_program(
  program: strategy.Program,
  mesh: jax.sharding.Mesh,
  test: digits.Batch,
  *,
  batch_size: int,
  seed: int,
) -> Compiled:
  """Initializes the state and compiles all that the loop runs.

  Args:
    program: the strategy's program.
    mesh: the replicas' devices.
    test: the test images.
    batch_size: images per step, over all replicas.
    seed: seed of the parameters.

  Returns:
    The compiled program.
  """
  state = program.init(model.init(seed))
  batch = digits.Batch(
    images=np.zeros((batch_size, *test.images.shape[1:]), test.images.dtype),
    labels=np.zeros(batch_size, test.labels.dtype),
  )
  step = program.step.lower(state, _put(batch, mesh)).compile()
  # One device processes the few test images faster than several would.
  device = mesh.devices.flat[0]
  on_device = jax.device_put(test, device)
  params = jax.device_put(program.eval_params(state), device)
  evaluate = jax.jit(model.count_correct).lower(params, on_device).compile()

  def count_correct(params):
    return int(evaluate(jax.device_put(params, device), on_device))

  if program.replica_params is None:
    return Compiled(state, step, count_correct)
  every = jax.device_put(program.replica_params(state), device)
  evaluate_all = jax.jit(jax.vmap(model.count_correct, in_axes=(0, None)))
  evaluate_every = evaluate_all.lower(every, on_device).compile()

  def count_correct_by_replica(params):
    counts = evaluate_every(jax.device_put(params, device), on_device)
    return counts.tolist()

  return Compiled(state, step, count_correct, count_correct_by_replica)


def train(
  program: strategy.Program,
  compiled: Compiled,
  mesh: jax.sharding.Mesh,
  data: tuple[digits.Batch, digits.Batch],
  *,
  epochs: int,
  batch_size: int,
  seed: int,
) -> Iterator[strategy.Record]:
  """Trains, and evaluates after each epoch.

  Args:
    program: the strategy's program.
    compiled: the compiled program.
    mesh: the replicas' devices.
    data: training images and test images.
    epochs: passes over the training images.
    batch_size: images per step, over all replicas.
    seed: seed of the order of the images.

  Yields:
    One record per step, as soon as the step is done: ``step`` and ``epoch``
    (from 1), the step's metrics (``loss`` and the strategy's own),
    ``samples_per_second`` and, after an epoch's last step, ``test_accuracy``
    (and ``replica_test_accuracy``, a list, if replicas have their own
    parameters).

  Raises:
    errors.CommandError: if a metric is not finite.
  """
  train_data, test_data = data
  rng = np.random.default_rng(seed)
  steps_per_epoch = len(train_data.labels) // batch_size
  state = compiled.state
  in_flight: collections.deque[dict[str, jax.Array]] = collections.deque()
  step = 0
  for epoch in range(1, epochs + 1):
    # The clock restarts in each epoch: evaluation is not training.
    before = time.perf_counter()
    batches = digits.epoch_batches(train_data, batch_size, rng)
    for last in range(1, steps_per_epoch + _IN_FLIGHT):
      if last <= steps_per_epoch:
        state, metrics = compiled.step(state, _put(next(batches), mesh))
        in_flight.append(metrics)
      if last < _IN_FLIGHT:
        continue
      step += 1
      record: strategy.Record = {"step": step, "epoch": epoch}
      record |= _numbers(in_flight.popleft(), step)
      now = time.perf_counter()
      record["samples_per_second"] = round(batch_size / (now - before), 1)
      before = now
      if step == epoch * steps_per_epoch:
        correct = compiled.count_correct(program.eval_params(state))
        images = len(test_data.labels)
        record["test_accuracy"] = correct / images
        if program.replica_params is not None:
          counts = compiled.count_correct_by_replica(
            program.replica_params(state)
          )
          record["replica_test_accuracy"] = [n / images for n in counts]
      yield record


def _put(batch: digits.Batch, mesh: jax.sharding.Mesh) -> digits.Batch:
  return jax.device_put(
    batch, NamedSharding(mesh, PartitionSpec(mesh.axis_names))
  )


def _numbers(metrics: dict[str, jax.Array], step: int) -> dict[str, float]:
  """Waits for a step's metrics."""
  numbers = {name: value.item() for name, value in metrics.items()}
  for name, value in numbers.items():
    if not math.isfinite(value):
      raise errors.CommandError(
        f"the training diverged: {name} is {value} at step {step}; try a smaller"
        " --learning-rate",
        exit_code=1,
      )
  return numbers
