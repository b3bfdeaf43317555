"""The source of latencies: a name and numbers, or a journal."""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable
from typing import Any

from optax_dist.cli import errors, parser
from optax_dist.cli.runs import journal_file

_LATENCIES = """\
Latencies are NAME:PARAMETERS, in seconds:
  constant:t                      always t
  exponential:mean
  shifted-exponential:shift,mean  at least shift, and an exponential more
  lognormal:mu,sigma              of the logarithm's mean and deviation
  pareto:scale,shape              at least scale; heavy tails below shape 2
  gamma:shape,scale
  bernoulli:fast,slow,p           slow with probability p, else fast
  slow-hosts:share,factor,NAME:PARAMETERS
                                  a share of the hosts is slower"""


def add_command(
  commands: Any,
  name: str,
  run: Callable[[argparse.Namespace], int],
  **texts: str,
) -> argparse.ArgumentParser:
  """Adds a command with the arguments of all simulations."""
  command = parser.add_command(commands, name, run, epilog=_LATENCIES, **texts)
  source = command.add_mutually_exclusive_group(required=True)
  source.add_argument(
    "--latency",
    metavar="NAME:PARAMETERS",
    help="how long a replica computes for a gradient, see below",
  )
  what = "take the latencies of a recorded run of the coordinator"
  source.add_argument("--journal", metavar="FILE", type=pathlib.Path, help=what)
  add = command.add_argument
  add(
    "--replicas",
    metavar="N",
    type=parser.whole_number(1, 10_000),
    help="replicas (default: as many as in the journal, else 8); further ones are"
    " taken to be like those of the journal",
  )
  add(
    "--max-staleness",
    metavar="N",
    type=parser.whole_number(0),
    help="largest staleness, in steps, at which a gradient counts (default: the"
    " journal's, else 0)",
  )
  add(
    "--cancel",
    action="store_true",
    help="late replicas drop their work at once; otherwise they first finish a"
    " gradient that is stale by then",
  )
  add(
    "--communication",
    metavar="SECONDS",
    type=parser.non_negative_float,
    help="time from the last gradient of a step until its parameters are there"
    " (default: the journal's, else 0)",
  )
  return command


def load(args: argparse.Namespace):
  """Loads what `--latency` or `--journal` names.

  Returns:
    The latency, and the `simulate.Recorded` run or None. Arguments that were not
    given are filled in.

  Raises:
    errors.CommandError: the latency is invalid, or the journal does not exist.
  """
  from optax_dist import simulate

  recorded = None
  try:
    if args.journal is None:
      latency = simulate.parse_latency(args.latency)
    else:
      records = journal_file.read(args.journal, "--journal ")
      recorded = simulate.from_journal(records)
      latency = recorded.latency
  except ValueError as error:
    what = "--latency" if args.journal is None else f"--journal {args.journal}"
    raise errors.CommandError(f"{what}: {error}") from error
  for warning in recorded.warnings if recorded else ():
    parser.say(f"{args.journal}: {warning}")
  if args.replicas is None:
    args.replicas = recorded.replicas if recorded else 8
  if args.max_staleness is None:
    args.max_staleness = recorded.strategy.max_staleness if recorded else 0
  if args.communication is None:
    args.communication = recorded.communication if recorded else 0.0
  args.cancel |= recorded is not None and recorded.strategy.cancel
  return latency, recorded


def predict(args: argparse.Namespace, recorded, strategy=None, failures=None):
  """Predicts the pace, and says why it can't be trusted, if so.

  Args:
    args: the parsed arguments, after `load`.
    recorded: the run of the journal.
    strategy: the one to predict; None for the recorded one.
    failures: as in `simulate.predict`.

  Returns:
    The `simulate.Prediction`. With `warnings`, no number that follows from the
    journal is printed.

  Raises:
    errors.CommandError: no step is ever taken.
  """
  from optax_dist import simulate

  try:
    predicted = simulate.predict(
      recorded,
      strategy,
      args.replicas,
      communication=args.communication,
      failures=failures,
    )
  except ValueError as error:
    raise errors.CommandError(f"{args.command}: {error}") from error
  for warning in predicted.warnings:
    if warning not in recorded.warnings:
      parser.say(f"{args.journal}: {warning}")
  return predicted
