"""What the processes of a launched training agree on, as JSON.

Each replica gets it, and stands in the journal as the run's ``config``:
replay builds model, data and optimizer from it again.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from optax_dist.cli import errors
from optax_dist.cli.train import optimizer

PROGRAM = "optax-dist train"
VARIABLE = "OPTAX_DIST_TRAINING"

# Flags of strategies that processes don't have, and what they are if not given.
_ELSEWHERE: dict[str, Any] = {
  "straggler": [],
  "variable_averages": None,
  "inner_state": "local",
  "rho": 0.0,
}

Config = dict[str, Any]


def make(args: argparse.Namespace, train_size: int) -> Config:
  """Takes what matters from the arguments of the command.

  Args:
    args: the parsed arguments; `replicas` is set.
    train_size: images to train on.

  Raises:
    errors.CommandError: the arguments can't work between processes.
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
    # Who is slow or away is not waited for, unless that is asked for.
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
  for name in (
    "max_staleness",
    "staleness_weight",
    "moving_rate",
    "outer_learning_rate",
    "outer_momentum",
    "communication_period",
    "fragments",
    "alpha",
  ):
    config[name] = getattr(args, name, None)
  period = config["communication_period"]
  if period:
    each = args.replicas if args.strategy == "elastic-average" else 1
    each *= config["fragments"] or 1
    config["commits"] = max(1, each * steps // period)
  return config


def make_optimizer(config: Config) -> Any:
  """The optimizer that `coordinator.join` is given."""
  return optimizer.make(
    config["optimizer"], config["learning_rate"], config["local_steps"]
  )


def join_arguments(config: Config) -> dict[str, Any]:
  """The arguments of `coordinator.join` that are the strategy's."""
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
  """What all replicas share before the first step."""
  from optax_dist.coordinator import strategies

  factory = join_arguments(config).get("strategy", strategies.SyncReplicas)
  quorum = strategies.Quorum(1, config["replicas"])
  return factory(make_optimizer(config), quorum).shared(params)


def make_gradient(
  config: Config, params: Any, images: Any, labels: Any
) -> Callable[[Any, list[int]], tuple[Any, Any]]:
  """The loss and gradient of a batch, which its key names.

  Args:
    config: of the run.
    params: of the form that it is compiled for.
    images: to train on.
    labels: what they show.

  Returns:
    From parameters and a key, a list of whole numbers, to both. The very same
    program in each replica and in replay, so that gradients are bit for bit
    the same.
  """
  import jax
  import numpy as np

  from optax_dist.cli.train import digits, model

  size = config["batch_size"]
  batch = digits.Batch(images[:size], labels[:size])
  program = jax.jit(jax.value_and_grad(model.loss))
  # Compiled once, wherever parameters come from.
  compiled = program.lower(params, batch).compile()

  def gradient(params: Any, key: list[int]) -> tuple[Any, Any]:
    rng = np.random.default_rng([config["seed"], *key])
    index = rng.choice(len(labels), size, replace=False)
    return compiled(params, digits.Batch(images[index], labels[index]))

  return gradient


def replay(config: Config) -> dict[str, Any]:
  """What `simulate.replay_run` needs to do a recorded training again."""
  from optax_dist.cli.train import digits, model

  train, _ = digits.load()
  params = model.init(config["seed"])
  gradient = make_gradient(config, params, train.images, train.labels)
  return {
    "optimizer": make_optimizer(config),
    "params": params,
    "gradient": lambda params, key: gradient(params, key)[1],
  }
