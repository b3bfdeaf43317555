"""The configuration that processes of a launched training share, as JSON.

Each replica gets it, and it is in the journal as the run's ``config``: replay
rebuilds model, data and optimizer from it.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from optax_dist.cli import errors
from optax_dist.cli.train import optimizer

PROGRAM = "optax-dist train"
VARIABLE = "OPTAX_DIST_TRAINING"

# Flags of strategies that don't apply to processes, with their defaults.
_ELSEWHERE: dict[str, Any] = {
  "straggler": [],
  "variable_averages": None,
  "inner_state": "local",
  "rho": 0.0,
}

# Flags of strategies that do.
_OF_STRATEGIES = (
  "max_staleness",
  "staleness_weight",
  "moving_rate",
  "outer_learning_rate",
  "outer_momentum",
  "communication_period",
  "fragments",
  "alpha",
)

Config = dict[str, Any]


def make(args: argparse.Namespace, train_size: int) -> Config:
  """Selects the relevant arguments of the command.

  Args:
    args: the parsed arguments; `replicas` is set.
    train_size: number of training images.

  Raises:
    errors.CommandError: the arguments are invalid for processes.
  """
  if args.strategy == "cross-shard":
    raise errors.CommandError(
      "--strategy cross-shard is one program over all devices; with --launch"
      " processes take sync-replicas, which waits for every replica by default"
    )
  for name, usual in _ELSEWHERE.items():
    if getattr(args, name, usual) != usual:
      flag = name.replace("_", "-")
      raise errors.CommandError(f"--{flag} does not go with --launch processes")
  aggregate = getattr(args, "replicas_to_aggregate", None) or args.replicas
  if args.strategy == "elastic-average":
    aggregate = 1
  if args.strategy == "decoupled-diloco":
    # By default a step does not wait for slow or absent replicas.
    aggregate = args.replicas_to_aggregate or (args.replicas + 1) // 2
    if aggregate > args.replicas:
      raise errors.CommandError(
        f"--replicas-to-aggregate must be at most the {args.replicas} replicas,"
        f" got {aggregate}: a learner has one contribution to give"
      )
  steps = args.epochs * (train_size // args.batch_size)
  config = {
    "program": PROGRAM,
    "strategy": args.strategy,
    "replicas": args.replicas,
    "replicas_to_aggregate": aggregate,
    "optimizer": args.optimizer,
    "learning_rate": args.learning_rate,
    "local_steps": steps,
    "steps_per_epoch": train_size // args.batch_size,
    "batch_size": args.batch_size // args.replicas,
    "seed": args.seed,
    "commits": steps,
  }
  for name in _OF_STRATEGIES:
    config[name] = getattr(args, name, None)
  period = config["communication_period"]
  if period:
    each = args.replicas if args.strategy == "elastic-average" else 1
    each *= config["fragments"] or 1
    config["commits"] = max(1, each * steps // period)
  return config


def flags(config: Config) -> dict[str, Any]:
  """The flags of the command that a run's numbers depend on, by name."""
  found = {
    name: config.get(name)
    for name in (
      "strategy",
      "optimizer",
      "replicas",
      "replicas_to_aggregate",
      "learning_rate",
      "seed",
      *_OF_STRATEGIES,
    )
  }
  found["epochs"] = config["local_steps"] // config["steps_per_epoch"]
  found["batch_size"] = config["batch_size"] * config["replicas"]
  return found


def make_optimizer(config: Config) -> Any:
  """The optimizer for `coordinator.join`."""
  return optimizer.make(
    config["optimizer"], config["learning_rate"], config["local_steps"]
  )


def join_arguments(config: Config) -> dict[str, Any]:
  """The strategy's arguments for `coordinator.join`."""
  import optax

  from optax_dist import coordinator

  found: dict[str, Any] = {
    "total_num_replicas": config["replicas"],
    "replicas_to_aggregate": config["replicas_to_aggregate"],
  }
  period = config["communication_period"]
  match config["strategy"]:
    case "sync-replicas":
      found["max_staleness"] = config["max_staleness"] or 0
      if config["staleness_weight"] == "inverse":
        found["staleness_weight"] = "inverse"
    case "elastic-average":
      rate = config["moving_rate"] or 0.9 / config["replicas"]
      found["strategy"] = coordinator.elastic_average(
        moving_rate=rate, communication_period=period
      )
    case "local-sgd":
      found["strategy"] = coordinator.local_updates(communication_period=period)
    case "diloco":
      found["strategy"] = coordinator.local_updates(
        optax.sgd(
          config["outer_learning_rate"],
          momentum=config["outer_momentum"],
          nesterov=True,
        ),
        communication_period=period,
      )
    case "decoupled-diloco":
      found["strategy"] = coordinator.decoupled_diloco(
        optax.sgd(
          config["outer_learning_rate"],
          momentum=config["outer_momentum"],
          nesterov=True,
        ),
        fragments=config["fragments"],
        period=period,
        alpha=config["alpha"],
      )
  return found


def first_state(config: Config, params: Any) -> Any:
  """The initial shared state of all replicas."""
  from optax_dist.coordinator import strategies

  factory = join_arguments(config).get("strategy", strategies.SyncReplicas)
  quorum = strategies.Quorum(1, config["replicas"])
  return factory(make_optimizer(config), quorum).shared(params)


def make_gradient(
  config: Config, params: Any, images: Any, labels: Any
) -> Callable[[Any, list[int]], tuple[Any, Any]]:
  """The loss and gradient of a batch that is named by its key.

  Args:
    config: the run's configuration.
    params: parameters with the structure to compile for.
    images: training images.
    labels: their labels.

  Returns:
    A function from parameters and a key, a list of whole numbers, to both.
    Replicas and replay use the same compiled program, so that gradients are
    equal bit for bit.
  """
  import jax
  import numpy as np

  from optax_dist.cli.train import digits, model

  size = config["batch_size"]
  batch = digits.Batch(images[:size], labels[:size])
  program = jax.jit(jax.value_and_grad(model.loss))
  # Compiled ahead, whatever the source of the parameters.
  compiled = program.lower(params, batch).compile()

  def gradient(params: Any, key: list[int]) -> tuple[Any, Any]:
    rng = np.random.default_rng([config["seed"], *key])
    index = rng.choice(len(labels), size, replace=False)
    return compiled(params, digits.Batch(images[index], labels[index]))

  return gradient


def replay(config: Config) -> dict[str, Any]:
  """The arguments of `simulate.replay_run` for a recorded training."""
  from optax_dist.cli.train import digits, model

  train, _ = digits.load()
  params = model.init(config["seed"])
  gradient = make_gradient(config, params, train.images, train.labels)
  return {
    "optimizer": make_optimizer(config),
    "params": params,
    "gradient": lambda params, key: gradient(params, key)[1],
  }
