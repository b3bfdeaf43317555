"""``optax-dist simulate``: simulates replicas in virtual time."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from optax_dist.cli import errors, installed, output_files, parser
from optax_dist.cli.simulate import latency_source

_DESCRIPTION = """\
Simulates replicas that train together, in virtual time, and reports how many steps
they would take, how much work would be dropped, and how time would be spent. The
rules are the coordinator's own. With a journal and no --strategy, the recorded run
is simulated, and its pace shown next to the simulation's."""

_NAMES = ("sync", "async", "bounded-staleness", "elastic", "local-updates")


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
    "--strategy",
    metavar="NAME",
    nargs="+",
    choices=_NAMES,
    help=f"one or more of {', '.join(_NAMES)} (default: all)",
  )
  add(
    "--backups",
    metavar="B",
    nargs="+",
    type=parser.whole_number(0),
    default=[0],
    help="for sync: replicas that a step does not wait for; several numbers to"
    " compare (default: 0)",
  )
  parser.add_number(
    command,
    "--communication-period",
    "N",
    parser.whole_number(1),
    default=10,
    help="for elastic and local-updates: local steps between communications",
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
    help="steps of sync; the others continue until as many gradients have been"
    " applied",
  )


def run(args: argparse.Namespace) -> int:
  """Runs the ``simulate`` command with its parsed arguments."""
  installed.check()
  output_files.check_writable(args.json, read=(args.journal,))
  latency, recorded = latency_source.load(args)
  from optax_dist import simulate
  from optax_dist.cli import bar

  again = recorded is not None and args.strategy is None
  chosen = _strategies(args)
  if recorded is not None and again:
    chosen = [recorded.strategy._replace(max_staleness=args.max_staleness)]
    args.failures = args.failures or recorded.failures
  budget = args.steps * args.replicas
  steps = [max(1, budget // s.replicas_to_aggregate) for s in chosen]
  timings = []
  title = f"{args.replicas} replicas, {latency}"
  with bar.bar(f"simulating {args.replicas} replicas", sum(steps)) as shown:
    for i, strategy in enumerate(chosen):
      try:
        timing = simulate.simulate_timing(
          strategy,
          latency,
          args.replicas,
          steps=steps[i],
          seed=args.seed,
          communication=args.communication,
          failures=args.failures,
          progress=_from(shown, sum(steps[:i])),
        )
      except ValueError as error:
        raise errors.CommandError(f"{strategy.name}: {error}") from error
      timings.append(timing)
  _show(title, timings)
  report: dict[str, Any] = {
    "latency": str(latency),
    "communication": args.communication,
    "simulations": [timing.report() for timing in timings],
  }
  if recorded is not None and recorded.steps_per_second is not None:
    report |= _compare(args, recorded, chosen[0], again)
  if args.json:
    output_files.write_json(args.json, report)
  output_files.tell(args.json)
  return 0


def _show(title: str, timings: list) -> None:
  """Prints a line for each simulation, and which of them stopped early."""
  from optax_dist.cli import tables

  shown = tables.table(title)
  shown.add_column("strategy", no_wrap=True)
  # The same categories as in `optax-dist report`, without those that are zero
  # everywhere, and without the unfinished time at the end.
  found = [timing.goodput() for timing in timings]
  categories = ["useful", "waiting", "dropped"]
  categories += [
    category
    for category in ("exchanging", "recovery")
    if any(one.seconds[category] > 0 for one in found)
  ]
  columns = ("steps/s", "gradients/s", "gradients dropped", "staleness")
  for name in (*columns, *categories):
    shown.add_column(name, justify="right")
  for timing, one in zip(timings, found, strict=True):
    shown.add_row(
      timing.strategy.name,
      f"{timing.steps_per_second:.4g}",
      f"{timing.gradients_per_second:.4g}",
      f"{timing.dropped_share:.1%}",
      f"{timing.mean_staleness:.3g}",
      *(f"{one.share(category):.1%}" for category in categories),
    )
  tables.show(shown)
  print("the columns after 'staleness' are shares of the replicas' time")
  for timing in timings:
    if timing.stopped:
      print(
        f"{timing.strategy.name}: stopped after {timing.commit_times.size:,} of"
        f" {timing.steps_asked:,} steps, since too few replicas were left"
      )


def _compare(
  args: argparse.Namespace, recorded, strategy, again: bool
) -> dict[str, Any]:
  """Prints the recorded and the predicted pace, with its uncertainty."""
  from optax_dist import simulate
  from optax_dist.coordinator import journal

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
  report: dict[str, Any] = {
    "recorded_steps_per_second": measured,
    "prediction": predicted._asdict(),
  }
  error = ""
  if again and args.replicas == recorded.replicas:
    error = f", {predicted.steps_per_second / measured - 1:+.1%}"
  print(f"recorded: {measured:.4g} steps/s; predicted: {predicted}{error}")
  records = journal.read(args.journal).records
  held_out = simulate.held_out(records, seed=args.seed)
  if held_out is not None:
    print(f"check: {held_out}")
    report["held_out"] = held_out.report()
  return report


def _strategies(args: argparse.Namespace) -> list:
  """The strategies to simulate, or an error if the arguments do not fit."""
  from optax_dist import simulate

  n, period = args.replicas, args.communication_period
  if max(args.backups) >= n:
    raise errors.CommandError(
      f"--backups {max(args.backups)} leaves none of --replicas {n} to wait for"
    )
  sync = [
    simulate.sync_replicas(
      n - b, max_staleness=args.max_staleness, cancel=args.cancel
    )._replace(name=f"sync, {b} backups")
    for b in dict.fromkeys(args.backups)
  ]
  strategies = {
    "sync": sync,
    "async": [simulate.asynchronous()],
    # By default, gradients may be as stale as one round of all replicas.
    "bounded-staleness": [simulate.bounded_staleness(args.max_staleness or n)],
    "elastic": [simulate.elastic_average(period)],
    "local-updates": [simulate.local_updates(n, period)],
  }
  names = dict.fromkeys(args.strategy or _NAMES)
  return [strategy for name in names for strategy in strategies[name]]


def _from(shown: Callable[[float], None], begun: int) -> Callable[[int], None]:
  return lambda done: shown(begun + done)


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
  return simulate.Failures(rate, downtime)
