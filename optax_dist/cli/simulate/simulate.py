"""``optax-dist simulate``: simulates replicas in virtual time."""

from __future__ import annotations

import argparse
import math

from optax_dist.cli import errors, parser
from optax_dist.cli.simulate import latency_source

_DESCRIPTION = """\
Simulates replicas that train together, in virtual time, and reports how many steps
they would take, how much work would be dropped, and how time would be spent. The
rules are the coordinator's own. With a journal and no --backups, the recorded run is
simulated, and its pace shown next to the simulation's."""


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
    nargs="+",
    type=parser.whole_number(0),
    help="replicas that a step does not wait for; several numbers to compare"
    " (default: those of the journal, else 0)",
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
  latency, recorded, records = latency_source.load(args)
  from optax_dist import simulate

  chosen = _strategies(args, recorded)
  if recorded is not None and args.backups is None:
    args.failures = args.failures or recorded.failures
  timings = []
  title = f"{args.replicas} replicas, {latency}"
  for strategy in chosen:
    try:
      timing = simulate.simulate_timing(
        strategy,
        latency,
        args.replicas,
        steps=args.steps,
        seed=args.seed,
        communication=args.communication,
        failures=args.failures,
      )
    except ValueError as error:
      raise errors.CommandError(f"{strategy.name}: {error}") from error
    timings.append(timing)
  _show(title, timings)
  if recorded is not None and recorded.steps_per_second is not None:
    _compare(args, recorded, chosen[0], records)
  return 0


def _show(title: str, timings: list) -> None:
  """Prints a line for each simulation, and which of them stopped early."""
  from optax_dist.cli import tables

  shown = tables.table(title)
  shown.add_column("", no_wrap=True)
  # Some of those of `optax-dist report`; the unfinished end is not shown.
  categories = ("useful", "waiting", "exchanging", "dropped", "recovery")
  columns = ("steps/s", "gradients/s", "gradients dropped", "staleness")
  for name in columns + categories:
    shown.add_column(name, justify="right")
  for timing in timings:
    goodput = timing.goodput()
    shown.add_row(
      timing.strategy.name,
      f"{timing.steps_per_second:.4g}",
      f"{timing.gradients_per_second:.4g}",
      f"{timing.dropped_share:.1%}",
      f"{timing.mean_staleness:.3g}",
      *(f"{goodput.share(category):.1%}" for category in categories),
    )
  tables.show(shown)
  print("the columns after 'staleness' are shares of the replicas' time")
  for timing in timings:
    if timing.stopped:
      print(
        f"{timing.strategy.name}: stopped after {timing.commit_times.size:,} of"
        f" {timing.steps_asked:,} steps, since too few replicas were left"
      )


def _compare(args: argparse.Namespace, recorded, strategy, records) -> None:
  """Prints the recorded and the predicted pace, with its uncertainty."""
  from optax_dist import simulate

  measured = recorded.steps_per_second
  predicted = simulate.predict(
    recorded,
    strategy,
    args.replicas,
    communication=args.communication,
    seed=args.seed,
  )
  for doubt in predicted.doubts:
    if doubt not in recorded.doubts:
      parser.say(f"{args.journal}: {doubt}")
  line = f"recorded: {measured:.4g} steps/s; predicted: {predicted}"
  if args.backups is None and args.replicas == recorded.replicas:
    line += f", {predicted.steps_per_second / measured - 1:+.1%}"
  print(line)
  held_out = simulate.held_out(records, seed=args.seed)
  if held_out is not None:
    first, second = held_out
    print(
      f"check: the first half predicts {first}, and the second took {second:.4g}"
      f" steps/s, {first.steps_per_second / second - 1:+.1%}"
    )


def _strategies(args: argparse.Namespace, recorded) -> list:
  """The strategies to simulate, or an error if the arguments do not fit."""
  from optax_dist import simulate

  if args.backups is None and recorded is not None:
    strategy = recorded.strategy._replace(cancel=args.cancel)
    return [strategy._replace(max_staleness=args.max_staleness)]
  n, backups = args.replicas, args.backups or [0]
  if max(backups) >= n:
    raise errors.CommandError(
      f"--backups {max(backups)} leaves none of --replicas {n} to wait for"
    )
  strategies = [
    simulate.sync_replicas(
      n - b, max_staleness=args.max_staleness, cancel=args.cancel
    )
    for b in backups
  ]
  return [
    strategy._replace(name=f"{b} backups")
    for b, strategy in zip(backups, strategies, strict=True)
  ]


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
