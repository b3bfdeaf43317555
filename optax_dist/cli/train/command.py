"""``optax-dist train``: trains a small network on real images."""

import argparse
import pathlib
import time
from collections.abc import Sequence

from optax_dist.cli import errors, installed, output, parser, reported
from optax_dist.cli.train import optimizer, strategies, strategy
from optax_dist.cli.train.processes import training as process_training

DEFAULT_STRATEGY = "cross-shard"
AXIS = "data"
FILES = ("metrics.jsonl", "training.png")

_DESCRIPTION = """\
Trains a small convolutional network on scikit-learn's digits, 1,797 real images
of handwritten digits, on several replicas: one on each device there is, or on
8 virtual devices if there is only a CPU. The same arguments, on the same kind of
machine, give the same numbers."""

_MAX_SEED = 2**32 - 1


def add_parser(commands, argv: Sequence[str]) -> None:
  """Adds the ``train`` command to the commands of a parser.

  Args:
    commands: what ``add_subparsers`` returned.
    argv: the arguments that will be parsed. Strategies' flags may have equal
      names, so only the chosen strategy's flags are added.
  """
  chosen = _chosen_strategy(argv)
  train = parser.add_command(
    commands,
    "train",
    run,
    help="train a small network on real images, on several replicas",
    description=_DESCRIPTION,
    epilog=_help_on_others(chosen),
  )
  add = train.add_argument
  add(
    "--strategy",
    metavar="NAME",
    choices=strategies.names(),
    default=DEFAULT_STRATEGY,
    help="how the replicas train together: "
    f"{', '.join(strategies.names())} (default: %(default)s)",
  )
  add(
    "--replicas",
    metavar="N",
    type=parser.whole_number(1),
    help="replicas, one per device; must divide the batch size (default: 8 on a"
    " CPU, else as many as there are devices)",
  )
  parser.add_number(
    train,
    "--epochs",
    "N",
    parser.whole_number(1),
    default=20,
    help="passes over the training images",
  )
  parser.add_number(
    train,
    "--batch-size",
    "N",
    parser.whole_number(1),
    default=64,
    help="images per step, over all replicas; at most 1437, the number of"
    " training images",
  )
  add(
    "--optimizer",
    metavar="NAME",
    default=optimizer.DEFAULT,
    help="what turns gradients into updates: a name in"
    " optax_dist.optimizers.REGISTRY, such as"
    f" {', '.join(optimizer.LEARNING_RATES)} (default: %(default)s)",
  )
  rates = [f"{r:g} for {n}" for n, r in optimizer.LEARNING_RATES.items()]
  add(
    "--learning-rate",
    metavar="RATE",
    type=parser.positive_float,
    help="initial learning rate; decays to 0 along a half cosine over the run"
    f" (default: {', '.join(rates)}, {optimizer.OTHER_LEARNING_RATE:g} for"
    " others)",
  )
  parser.add_number(
    train,
    "--seed",
    "N",
    parser.whole_number(0, _MAX_SEED),
    default=0,
    help="seed of the initial parameters and of the images' order",
  )
  add(
    "--output",
    metavar="DIR",
    type=pathlib.Path,
    default=pathlib.Path("optax-dist-train"),
    help="directory for metrics.jsonl and training.png; created if it is missing,"
    " and the two files are overwritten (default: %(default)s)",
  )
  reported.add_arguments(train)
  process_training.add_arguments(train)
  if chosen in strategies.names():
    _add_strategy(train, chosen)


def run(args: argparse.Namespace) -> int:
  """Runs the ``train`` command with its parsed arguments."""
  chosen = strategies.load(args.strategy)
  if args.learning_rate is None:
    args.learning_rate = optimizer.default_learning_rate(args.optimizer)
  _check(args)
  chosen.check(args)
  process_training.check(args)
  if args.launch:
    with output.prepared(args.output, list(process_training.FILES)) as paths:
      return process_training.run(args, paths)
  with output.prepared(args.output, list(FILES)) as paths:
    return _train(args, chosen, paths)


def _train(
  args: argparse.Namespace,
  chosen: strategy.Strategy,
  paths: Sequence[pathlib.Path],
) -> int:
  """Trains in this process.

  Args:
    args: the parsed arguments, checked.
    chosen: the strategy.
    paths: writable paths of `FILES`.
  """
  # Slow imports follow.
  from optax_dist.cli import devices
  from optax_dist.cli.train import progress
  from optax_dist.coordinator import interrupts

  mesh = devices.replica_mesh(args.replicas, args.batch_size, AXIS)
  from optax_dist.cli.train import (
    digits,
    loop,
    metrics,
    model,
    numbers,
    picture,
  )

  data = digits.load()
  steps_per_epoch = digits.TRAIN_SIZE // args.batch_size
  steps = args.epochs * steps_per_epoch
  program = chosen.build(
    strategy.Run(
      args=args,
      mesh=mesh,
      axis_name=AXIS,
      loss_fn=model.loss,
      optimizer=optimizer.make(args.optimizer, args.learning_rate, steps),
      steps=steps,
    )
  )
  replicas = f"{mesh.size} {'replica' if mesh.size == 1 else 'replicas'}"
  replicas += f" on {mesh.devices.flat[0].platform.upper()}"
  records: list[strategy.Record] = []
  with (
    # An exception is lost in JAX's callback of the garbage collector.
    interrupts.handled() as told,
    reported.reporting(args, None) as reporter,
    metrics.JsonLines(paths[0]) as lines,
    progress.Progress(args.epochs, steps) as shown,
  ):
    latest = numbers.TrainingNumbers()
    if reporter is not None:
      reporter.add(latest.metrics)
    try:
      shown.message(f"{args.strategy}: compiling for {replicas}")
      compiled = loop.compile_program(
        program, mesh, data[1], batch_size=args.batch_size, seed=args.seed
      )
      start = time.perf_counter()
      for record in loop.train(
        program,
        compiled,
        mesh,
        data,
        epochs=args.epochs,
        batch_size=args.batch_size,
        seed=args.seed,
      ):
        # The step that is told is the last one in the file.
        told.at_once = False
        lines.write(record)
        records.append(record)
        latest.take(record)
        shown.show(record)
        told.at_once = True
        told.check()
      seconds = time.perf_counter() - start
    except KeyboardInterrupt:
      raise errors.Interrupted(
        f"interrupted after step {len(records)} of {steps}; the metrics so far"
        f" are in {paths[0]}"
      ) from None
  picture.save(
    paths[1], records, f"Digits, {args.strategy}, {replicas}", program.panels
  )
  images = steps * args.batch_size
  print(
    f"{args.strategy}, {replicas}: {steps:,} steps, {images:,} images in"
    f" {seconds:.1f} s"
  )
  for line in program.summary(records):
    print(line)
  accuracy = records[-1]["test_accuracy"]
  print(
    f"test accuracy {accuracy:.1%}, metrics in {paths[0]}, picture in {paths[1]}"
  )
  return 0


def _check(args: argparse.Namespace) -> None:
  """Raises an error if the arguments are invalid; it is fast."""
  from optax_dist.cli.train import digits

  if args.batch_size > digits.TRAIN_SIZE:
    raise errors.CommandError(
      f"--batch-size {args.batch_size} is more than the {digits.TRAIN_SIZE}"
      " training images"
    )
  if args.replicas and args.batch_size % args.replicas:
    raise errors.CommandError(
      f"--replicas {args.replicas} does not divide --batch-size"
      f" {args.batch_size}"
    )
  optimizer.check(args.optimizer)
  installed.check("flax", "sklearn")


def _chosen_strategy(argv: Sequence[str]) -> str:
  """The strategy among the arguments, before they are parsed."""
  early = parser.Parser(prog="optax-dist train", add_help=False)
  early.add_argument("--strategy", default=DEFAULT_STRATEGY)
  return early.parse_known_args(argv)[0].strategy


def _add_strategy(to: argparse.ArgumentParser, name: str) -> None:
  chosen = strategies.load(name)
  group = to.add_argument_group(f"options of --strategy {name}", chosen.summary)
  chosen.add_arguments(group)


def _help_on_others(chosen: str) -> str:
  """Help on the flags of the other strategies."""
  texts = []
  for name in strategies.names():
    if name != chosen:
      others = parser.Parser(usage=argparse.SUPPRESS, add_help=False)
      _add_strategy(others, name)
      texts.append(others.format_help().strip())
  return "\n\n".join(texts)
