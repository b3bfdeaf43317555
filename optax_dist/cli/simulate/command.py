"""``optax-dist simulate``: simulates replicas in virtual time."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import pathlib
from collections.abc import Callable
from typing import Any

from optax_dist.cli import errors, installed, output_files, parser
from optax_dist.cli.simulate import latency_source

_DESCRIPTION = """\
Simulates replicas that train together, in virtual time, and reports how many steps
they would take, how much work would be dropped, and how time would be spent. The
rules are the coordinator's own. With a journal and no --strategy, the
recorded run is simulated, and its pace shown next to the simulation's. With --train
a small network learns scikit-learn's digits in that virtual time, each gradient
computed on the parameters that its replica would hold."""

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
    help="for sync: replicas that are not waited for; several numbers to compare"
    " (default: 0)",
  )
  add(
    "--communication-period",
    metavar="N",
    nargs="+",
    type=parser.whole_number(1),
    default=[10],
    help="for elastic and local-updates: local steps between communications"
    " (default: 10)",
  )
  latency_source.add_run_arguments(command)
  add(
    "--failures",
    metavar="RATE,DOWNTIME",
    type=_failures,
    help="failures per second of each replica, and seconds until it is back"
    " (default: none)",
  )
  parser.add_number(
    command,
    "--steps",
    "N",
    parser.whole_number(1),
    default=10_000,
    help="steps of sync; the others continue until as many gradients have been"
    " applied",
  )
  what = "record the simulation of one strategy as the coordinator would"
  parser.add_file(command, "--write-journal", what)

  training = command.add_argument_group("options of --train")
  training.add_argument(
    "--train",
    action="store_true",
    help="train a small network, and print loss and accuracy",
  )
  training.add_argument(
    "--seconds",
    metavar="S",
    type=parser.positive_float,
    help="virtual time (default: 300 times the mean latency)",
  )
  parser.add_number(
    training,
    "--learning-rate",
    "RATE",
    parser.positive_float,
    default=0.1,
    help="learning rate of plain gradient descent",
  )


def run(args: argparse.Namespace) -> int:
  """Runs the ``simulate`` command with its parsed arguments."""
  installed.check()
  output_files.check_writable(
    args.json,
    args.write_journal,
    picture=args.save,
    read=(args.journal, *args.more_journals),
  )
  latency, recorded = latency_source.load(args)
  if args.train:
    return _train(args, latency, recorded)
  from optax_dist import simulate
  from optax_dist.cli import bar
  from optax_dist.cli.simulate import timing_table

  chosen = _strategies(args, recorded)
  communication = latency_source.communication(args, recorded)
  if args.write_journal and len(chosen) > 1:
    raise errors.CommandError(
      "--write-journal records one strategy; choose it with --strategy"
    )
  budget = args.steps * args.replicas
  steps = [max(1, budget // s.replicas_to_aggregate) for s in chosen]
  timings = []
  with contextlib.ExitStack() as stack:
    shown = stack.enter_context(
      bar.bar(f"simulating {args.replicas} replicas", sum(steps))
    )
    journal = _journal(args.write_journal, stack)
    for i, strategy in enumerate(chosen):
      begun = sum(steps[:i])
      timings.append(
        simulate.simulate_timing(
          strategy,
          latency,
          args.replicas,
          steps=steps[i],
          seed=args.seed,
          communication=communication(strategy.replicas_to_aggregate),
          failures=args.failures or _recorded_failures(args, recorded),
          journal=journal,
          progress=_from(shown, begun),
        )
      )
  timing_table.show(f"{args.replicas} replicas, {latency}", timings)
  report: dict[str, Any] = {
    "latency": str(latency),
    "communication": [communication(s.replicas_to_aggregate) for s in chosen],
    "simulations": [timing.report() for timing in timings],
  }
  if recorded is not None and recorded.steps_per_second is not None:
    report |= _compare(args, recorded, chosen[0])
  if args.json:
    output_files.write_json(args.json, report)
  if args.save:
    from optax_dist.cli.simulate import timing_picture

    timing_picture.save(
      args.save, timings, f"{args.replicas} replicas, {latency}"
    )
  output_files.tell(args.json, args.save, args.write_journal)
  return 0


def _recorded_failures(args: argparse.Namespace, recorded):
  """The journal's failures, if the recorded run is simulated."""
  alike = recorded is not None and args.strategy is None
  return recorded.failures if alike else None


def _compare(args: argparse.Namespace, recorded, strategy) -> dict[str, Any]:
  """Prints the recorded and the predicted pace, with its uncertainty."""
  from optax_dist import simulate
  from optax_dist.coordinator import journal

  measured = recorded.steps_per_second
  predicted = simulate.predict(
    recorded,
    strategy,
    args.replicas,
    nbytes=args.model_bytes,
    network=args.network,
    seed=args.seed,
  )
  for doubt in predicted.doubts:
    if doubt not in recorded.doubts:
      parser.say(f"{args.journal}: {doubt}")
  report: dict[str, Any] = {
    "recorded_steps_per_second": measured,
    "prediction": predicted._asdict(),
  }
  print(f"recorded: {measured:.4g} steps/s; predicted: {predicted}", end="")
  if args.strategy is None and args.replicas == recorded.replicas:
    print(f", {predicted.steps_per_second / measured - 1:+.1%}")
  else:
    print()
  records = journal.read(args.journal).records
  held_out = simulate.held_out(records, seed=args.seed)
  if held_out is not None:
    print(f"held out: {held_out}")
    report["held_out"] = {
      "predicted": held_out.predicted._asdict(),
      "measured": held_out.measured,
      "error": held_out.error,
      "inside": held_out.inside,
    }
  return report


def _train(args: argparse.Namespace, latency, recorded) -> int:
  """Trains in virtual time."""
  if args.write_journal:
    raise errors.CommandError("--write-journal does not go with --train")
  installed.check("sklearn")
  seconds = args.seconds or 300 * latency.mean
  if not math.isfinite(seconds):
    raise errors.CommandError(
      f"{latency} has no mean, so --train needs --seconds"
    )
  from optax_dist.cli import bar
  from optax_dist.cli.simulate import simulated_training

  chosen = _strategies(args, recorded)
  try:
    with bar.bar(f"training {args.replicas} replicas", len(chosen)) as shown:
      trainings = simulated_training.run(
        chosen,
        latency,
        args.replicas,
        seconds=seconds,
        seed=args.seed,
        learning_rate=args.learning_rate,
        progress=shown,
        communication=latency_source.communication(args, recorded)(
          args.replicas
        ),
        failures=args.failures,
      )
  except ValueError as error:
    raise errors.CommandError(str(error)) from error
  title = f"{args.replicas} replicas, {latency}"
  simulated_training.show(f"{title}, {seconds:.4g} virtual seconds", trainings)
  if args.json:
    reports = [simulated_training.report(training) for training in trainings]
    output_files.write_json(
      args.json, {"latency": str(latency), "trainings": reports}
    )
  if args.save:
    simulated_training.save(args.save, trainings, title)
  output_files.tell(args.json, args.save)
  return 0


def _strategies(args: argparse.Namespace, recorded) -> list:
  """The strategies to simulate, or an error if the arguments do not fit."""
  from optax_dist import simulate

  n = args.replicas
  if args.strategy is None and recorded is not None:
    strategy = recorded.strategy
    if args.cancel:
      strategy = strategy._replace(cancel=True)
    return [strategy._replace(max_staleness=args.max_staleness)]
  backups = [0] if args.backups is None else args.backups
  if max(backups) >= n:
    raise errors.CommandError(
      f"--backups {max(backups)} leaves none of --replicas {n} to wait for"
    )
  chosen = []
  for name in dict.fromkeys(args.strategy or _NAMES):
    match name:
      case "sync":
        chosen += [
          simulate.sync_replicas(
            n - b, max_staleness=args.max_staleness, cancel=args.cancel
          )._replace(name=f"sync, {b} backups")
          for b in dict.fromkeys(backups)
        ]
      case "async":
        chosen.append(simulate.asynchronous())
      case "bounded-staleness":
        # By default, gradients may be as stale as one round of all replicas.
        chosen.append(simulate.bounded_staleness(args.max_staleness or n))
      case "elastic":
        chosen += map(simulate.elastic_average, args.communication_period)
      case "local-updates":
        chosen += [
          simulate.local_updates(n, period)
          for period in args.communication_period
        ]
  return chosen


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
  rate, downtime = map(parser.positive_float, parts)
  return simulate.Failures(rate, downtime)


def _journal(path: pathlib.Path | None, stack: contextlib.ExitStack):
  if path is None:
    return None
  from optax_dist.coordinator import journal

  try:
    if path.is_file():
      # Emptied in place, since it may be a link; all else is refused below.
      os.truncate(path, 0)
    return stack.enter_context(journal.Journal(path))
  except OSError as error:
    raise errors.CommandError(
      f"--write-journal {path}: can't be written: {error.strerror}"
    ) from error
