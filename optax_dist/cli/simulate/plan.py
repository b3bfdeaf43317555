"""``optax-dist plan``: how many gradients a step should have."""

from __future__ import annotations

import argparse
import math

from optax_dist.cli import errors, parser
from optax_dist.cli.simulate import latency_source

_DESCRIPTION = """\
Recommends how many gradients a step of sync replicas should aggregate, for
given latencies, and shows the table behind it. With more, steps wait for
stragglers; with fewer, work is left unused. Progress counts steps per second,
weighted by the gradients in each: a step from k of them makes k / (k + B) of
the progress of a noiseless one, with B the noise scale; it is counted in
steps from all replicas."""


def add_parser(commands) -> None:
  """Adds the ``plan`` command to the commands of a parser."""
  command = latency_source.add_command(
    commands,
    "plan",
    run,
    help="recommend how many gradients a step should have",
    description=_DESCRIPTION,
  )
  command.add_argument(
    "--noise-scale",
    metavar="B",
    type=_noise_scale,
    help="gradients of one replica at which their noise is as large as their"
    " mean; 'inf' to count gradients (default: the number of replicas)",
  )
  command.add_argument(
    "--steps",
    metavar="N",
    type=parser.whole_number(1),
    help="steps in each simulation (default: 200 with up to 8 replicas, fewer"
    " with more)",
  )
  parser.add_number(
    command,
    "--repetitions",
    "N",
    parser.whole_number(2),
    default=20,
    help="simulations of each number of gradients; with a journal, each"
    " resamples the recorded times",
  )


def run(args: argparse.Namespace) -> int:
  """Runs the ``plan`` command with its parsed arguments."""
  latency, recorded = latency_source.load(args)
  if recorded is not None and recorded.strategy.kind == "elastic_average":
    raise errors.CommandError(
      f"--journal {args.journal}: it is of elastic averaging, where no gradients"
      " are aggregated"
    )
  if recorded and latency_source.predict(args, recorded).warnings:
    print("no recommendation, for the reasons above")
    return 1
  from optax_dist import simulate

  try:
    plan = simulate.plan(
      latency,
      args.replicas,
      noise_scale=args.noise_scale,
      cancel=args.cancel,
      max_staleness=args.max_staleness,
      communication=args.communication,
      steps=args.steps,
      repetitions=args.repetitions,
    )
  except ValueError as error:
    raise errors.CommandError(f"plan: {error}") from error
  title = f"{args.replicas} replicas, {latency}"
  _show(plan, title)
  if recorded and recorded.losses:
    print(
      f"not in it: what the {len(recorded.losses)} recorded losses of replicas cost;"
      " a step from all waits for each"
    )
  return 0


def _show(plan, title: str) -> None:
  from optax_dist.cli import tables

  best = plan.recommended
  rows = [
    {
      "k": f"{row.replicas_to_aggregate:,}",
      "backups": f"{plan.replicas - row.replicas_to_aggregate:,}",
      "steps/s": f"{row.steps_per_second:.4g}",
      "gradients/s": f"{row.gradients_per_second:.4g}",
      "wasted": f"{row.wasted:.1%}",
      "progress": f"{row.progress:.4g}",
      "95 % interval": f"{row.low:.4g} to {row.high:.4g}",
      "best in": f"{row.best:.0%}",
    }
    for row in plan.candidates
  ]
  print(tables.text(title, list(rows[0]), rows))
  n, all_in = plan.replicas, plan.candidates[-1]
  print(
    f"recommended: replicas_to_aggregate={best.replicas_to_aggregate} of {n},"
    f" {best.progress / all_in.progress:.2f} times the progress of waiting for"
    " all"
  )
  if plan.runner_up is not None:
    print(
      f"runner-up: k = {plan.runner_up.replicas_to_aggregate} of {n}\n"
      f"reason: {plan.reason}"
    )
  from_ = "resampled from the recorded times" if plan.resampled else "simulated"
  print(
    f"uncertainty: it is the best in {best.best:.0%} of {plan.repetitions}"
    f" repetitions, {from_}; in 95 % of them the best is from {plan.best_low} to"
    f" {plan.best_high}"
  )
  noise = plan.noise_scale
  weighed = (
    "each gradient counts the same"
    if math.isinf(noise)
    else f"noise scale {noise:g}"
  )
  print(f"progress: in steps from all {n} replicas, per second; {weighed}")


def _noise_scale(text: str) -> float:
  """An argument type: a number of at least 0, or infinity."""
  if text == "inf":
    return math.inf
  return parser.non_negative_float(text)
