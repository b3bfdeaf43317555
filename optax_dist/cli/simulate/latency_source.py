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
                                  a share of the hosts takes factor times longer"""


def add_command(
  commands: Any,
  name: str,
  run: Callable[[argparse.Namespace], int],
  **texts: str,
) -> argparse.ArgumentParser:
  """Adds a command about latencies; see `parser.add_command`."""
  command = parser.add_command(commands, name, run, epilog=_LATENCIES, **texts)
  add_arguments(command)
  return command


def add_arguments(to: argparse.ArgumentParser) -> None:
  """Adds --latency, --journal and --replicas."""
  source = to.add_mutually_exclusive_group(required=True)
  source.add_argument(
    "--latency",
    metavar="NAME:PARAMETERS",
    help="how long a replica computes for a gradient, see below",
  )
  what = "take the latencies of a recorded run of the coordinator"
  parser.add_file(source, "--journal", what)
  to.add_argument(
    "--replicas",
    metavar="N",
    type=parser.whole_number(1, 100_000),
    help="replicas (default: as many as in the journal, else 8)",
  )


def add_run_arguments(to: argparse.ArgumentParser) -> None:
  """Adds the arguments of all simulations: --cancel, --communication, ..."""
  add = to.add_argument
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
    " (default: the journal's, else by --network and --model-bytes, else 0)",
  )
  add(
    "--model-bytes",
    metavar="N",
    type=parser.non_negative_float,
    help="size of a gradient, as it is sent (default: the journal's, else 0)",
  )
  add(
    "--network",
    metavar="LATENCY,BANDWIDTH",
    type=_network,
    help="seconds one way, and bytes per second of a replica or group (default: the"
    " journal's, else no time at all)",
  )
  add(
    "--more-journals",
    metavar="FILE",
    nargs="+",
    type=pathlib.Path,
    default=[],
    help="with --journal: runs with gradients of other sizes over the same network,"
    " to separate latency and bandwidth",
  )
  parser.add_number(
    to,
    "--seed",
    "N",
    parser.whole_number(0),
    default=0,
    help="seed of the simulation; equal seeds give equal output",
  )
  parser.add_file(to, "--json", "write all figures")
  what = "save a picture: PNG, JPEG, SVG or PDF, by its name"
  parser.add_file(to, "--save", what)


def load(args: argparse.Namespace):
  """Loads what the arguments of `add_arguments` name.

  Returns:
    The latency, and the `simulate.Recorded` run or None. `args.replicas` and
    `args.max_staleness` are filled in; `args.network` is a `simulate.Network`
    or None.

  Raises:
    errors.CommandError: the latency is invalid, or the journal does not exist.
  """
  from optax_dist import simulate

  recorded = None
  if args.more_journals and args.journal is None:
    raise errors.CommandError("--more-journals goes with --journal")
  try:
    if args.journal is None:
      latency = simulate.parse_latency(args.latency)
    else:
      recorded = simulate.from_journal(
        journal_file.read(args.journal, "--journal "),
        [journal_file.read(p, "--more-journals ") for p in args.more_journals],
      )
      latency = recorded.latency
  except ValueError as error:
    what = "--latency" if args.journal is None else f"--journal {args.journal}"
    raise errors.CommandError(f"{what}: {error}") from error
  if args.network is not None:
    args.network = simulate.Network(*args.network)
  if args.replicas is None:
    args.replicas = recorded.replicas if recorded else 8
  if recorded and recorded.strategy.cancel:
    args.cancel = True
  for doubt in recorded.doubts if recorded else ():
    parser.say(f"{args.journal}: {doubt}")
  if args.max_staleness is None:
    late = recorded.strategy.max_staleness if recorded else 0
    args.max_staleness = late
  return latency, recorded


def communication(args: argparse.Namespace, recorded) -> Callable[[int], float]:
  """Seconds of communication as a function of the gradients in a step.

  Args:
    args: the parsed arguments, after `load`.
    recorded: the run from `load`.

  Raises:
    errors.CommandError: the journal does not say.
  """
  if args.communication is not None:
    return lambda members: args.communication
  network = args.network
  if recorded is None:
    if network is None:
      return lambda members: 0.0
    nbytes = args.model_bytes or 0.0
    return lambda members: network.all_reduce(nbytes, max(2, members))
  try:
    recorded.communication_of(1, args.model_bytes, network)
  except ValueError as error:
    raise errors.CommandError(f"--journal {args.journal}: {error}") from error
  if recorded.exchange is not None:
    for doubt in recorded.exchange.doubts(args.model_bytes, network):
      parser.say(f"{args.journal}: {doubt}")
  return lambda members: recorded.communication_of(
    min(members, args.replicas), args.model_bytes, network
  )


def _network(text: str) -> tuple[float, float]:
  """An argument type: a number of at least 0 and a positive one."""
  parts = text.split(",")
  if len(parts) != 2:
    raise argparse.ArgumentTypeError(
      f"must be LATENCY,BANDWIDTH, two numbers, got {text!r}"
    )
  return parser.non_negative_float(parts[0]), parser.positive_float(parts[1])
