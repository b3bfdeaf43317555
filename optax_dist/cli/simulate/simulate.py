"""``optax-dist simulate``: simulates replicas in virtual time."""

from __future__ import annotations

import argparse
import math

from optax_dist.cli import errors, parser
from optax_dist.cli.simulate import latency_source

_DESCRIPTION = """\
Simulates replicas that train together, in virtual time, and reports how many
steps they would take, how much work would be dropped, and how time would be
spent. The rules are the coordinator's own. With a journal and no --backups,
the recorded run is simulated, and its pace shown next to the simulation's. A
journal that does not tell enough gives no prediction, but the reasons, and exit
code 1; so does, after its numbers, a simulation that runs out of replicas."""


def add_parser(commands) -> None:
  """Adds the ``simulate`` command to the commands of a parser."""
  command = latency_source.add_command(
    commands,
    "simulate",
    run,
    help="simulate replicas in virtual time",
    description=_DESCRIPTION,
  )
  add = command.add_argument
  add(
    "--backups",
    metavar="B",
    type=parser.whole_number(0),
    help="replicas that a step does not wait for (default: those of the journal,"
    " else 0); optax-dist plan compares numbers",
  )
  add(
    "--failures",
    metavar="RATE,DOWNTIME",
    type=_failures,
    help="failures per second of each replica, and seconds until it is back,"
    " 'inf' for never"
    " (default: the journal's if its run is simulated, else none)",
  )
  parser.add_number(
    command,
    "--steps",
    "N",
    parser.whole_number(1),
    default=1000,
    help="steps to simulate",
  )


def run(args: argparse.Namespace) -> int:
  """Runs the ``simulate`` command with its parsed arguments."""
  latency, recorded = latency_source.load(args)
  from optax_dist import simulate

  strategy = _strategy(args, recorded)
  line = ""
  if recorded is not None:
    if args.backups is None:
      args.failures = args.failures or recorded.failures
    line, is_trusted = _predict(args, recorded, strategy)
    if not is_trusted:
      print(line)
      return 1
  try:
    timing = simulate.simulate_timing(
      strategy,
      latency,
      args.replicas,
      steps=args.steps,
      communication=args.communication,
      failures=args.failures,
    )
  except ValueError as error:
    raise errors.CommandError(f"simulate: {error}") from error
  if timing.stopped:
    print(
      f"stopped after {timing.commit_times.size:,} of {timing.steps_requested:,} steps:"
      " too few replicas were left. What follows is of the time until then."
    )
  k = strategy.replicas_to_aggregate
  latency = parser.plain(f"{latency}")
  print(f"{args.replicas} replicas, steps of {k} gradients, {latency}")
  _show(timing)
  if line:
    print(line)
  return int(timing.stopped)


def _show(timing) -> None:
  """Prints the numbers of a simulation."""
  numbers = {
    "steps/s": f"{timing.steps_per_second:.4g}",
    "gradients/s": f"{timing.gradients_per_second:.4g}",
    "gradients dropped": f"{timing.dropped_share:.1%}",
    "staleness": f"{timing.mean_staleness:.3g}",
  }
  for category, share in timing.goodput().shares().items():
    numbers[f"time {category}"] = f"{share:.1%}"
  for name, text in numbers.items():
    print(f"  {name:<18}{text:>8}")


def _predict(args: argparse.Namespace, recorded, strategy) -> tuple[str, bool]:
  """The recorded and the predicted pace in words, and whether to trust it."""
  own = args.failures == recorded.failures
  # Failures from the command line have an exact rate.
  failures = ... if own else args.failures
  predicted = latency_source.predict(args, recorded, strategy, failures)
  measured = recorded.steps_per_second
  line = "" if measured is None else f"recorded: {measured:.4g} steps/s; "
  if predicted.warnings:
    return f"{line}no prediction, for the reasons above", False
  line += f"predicted: {predicted}"
  same = args.backups is None and args.replicas == recorded.replicas
  if same and own:
    line += f", {predicted.steps_per_second / measured - 1:+.1%}"
  return line, True


def _strategy(args: argparse.Namespace, recorded):
  """The strategy to simulate, or an error if the arguments do not fit."""
  from optax_dist import simulate

  if args.backups is None and recorded is not None:
    strategy = recorded.strategy._replace(cancel=args.cancel)
    return strategy._replace(max_staleness=args.max_staleness)
  n, backups = args.replicas, args.backups or 0
  if backups >= n:
    raise errors.CommandError(
      f"--backups {backups} leaves none of --replicas {n} to wait for"
    )
  return simulate.sync_replicas(
    n - backups, max_staleness=args.max_staleness, cancel=args.cancel
  )


def _failures(text: str):
  """An argument type: two positive numbers."""
  from optax_dist import simulate

  parts = text.split(",")
  if len(parts) != 2:
    raise argparse.ArgumentTypeError(
      f"must be RATE,DOWNTIME, two numbers above 0, got {text!r}"
    )
  rate = parser.positive_float(parts[0])
  downtime = math.inf if parts[1] == "inf" else parser.positive_float(parts[1])
  return simulate.Failures(rate, (downtime,))
