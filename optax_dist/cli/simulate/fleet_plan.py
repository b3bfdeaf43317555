"""``optax-dist plan --chips``: a strategy for a fleet whose chips fail."""

from __future__ import annotations

import argparse
import dataclasses
import math
import pathlib
import statistics
from typing import Any

from optax_dist.cli import errors, output_files, parser

_MTBF = 50_000
_TIMES = {
  "repair": (600.0, "until a failed group has working chips again"),
  "detect": (10.0, "until the others know of a failure"),
  "restart": (60.0, "until a program that is started anew computes"),
  "save-pause": (10.0, "for which all stand still to save a checkpoint"),
  "restore": (30.0, "until a checkpoint is loaded"),
  "reshard": (30.0, "until the state is laid out for other groups"),
  "catch-up": (30.0, "until a group that comes back has the others' state"),
}
# Times of a fleet that come from the journal's failures.
_OF_FAULTS = {
  "detect": "unnoticed",
  "repair": "restarted",
  "catch-up": "caught_up",
}


def add_arguments(to: argparse.ArgumentParser) -> None:
  """Adds the arguments of a fleet."""
  group = to.add_argument_group(
    "options of --chips (the latency is that of a group's step)"
  )
  add = group.add_argument
  add(
    "--chips",
    metavar="N",
    type=parser.whole_number(1, 10_000_000),
    help="plan for a fleet of this many chips that fail",
  )
  add(
    "--chips-per-group",
    metavar="N",
    nargs="+",
    type=parser.whole_number(1),
    default=[8],
    help="chips that compute one gradient together; several to choose from"
    " (default: 8)",
  )
  add(
    "--chip-mtbf",
    metavar="HOURS",
    type=parser.positive_float,
    help="mean hours between failures of one chip (default: the journal's, else"
    f" {_MTBF:,})",
  )
  for name, (default, what) in _TIMES.items():
    journal = "the journal's, else " if name in _OF_FAULTS else ""
    add(
      f"--{name}",
      metavar="SECONDS",
      type=parser.non_negative_float,
      help=f"{what} (default: {journal}{default:g})",
    )
  add(
    "--periods",
    metavar="N",
    nargs="+",
    type=parser.whole_number(1),
    default=[10, 50, 200],
    help="local steps between exchanges, to choose from (default: 10 50 200)",
  )
  parser.add_number(
    group,
    "--local-step-value",
    "X",
    parser.positive_float,
    default=1.0,
    help="value of a local step, relative to one whose gradient is exchanged",
  )


def run(args: argparse.Namespace, latency, recorded) -> int:
  """Plans for a fleet, with the parsed arguments of ``plan``.

  Args:
    args: the parsed arguments.
    latency: latency of a group's step.
    recorded: the journal's run, or None; the source of values that were not
      given: bytes, network, failures.
  """
  from optax_dist import simulate
  from optax_dist.cli import bar
  from optax_dist.simulate import Network, scale

  nbytes, network = args.model_bytes, args.network or Network()
  if recorded is not None:
    # Each replica keeps its own latency, without their correlation.
    latency = simulate.PerHost(recorded.latency.latencies)
    if recorded.exchange is not None:
      nbytes = recorded.exchange.nbytes if nbytes is None else nbytes
      network = network if args.network else recorded.exchange.network
      for doubt in recorded.exchange.doubts(nbytes):
        parser.say(f"{args.journal}: {doubt}")
  try:
    fleet = scale.Fleet(
      args.chips,
      args.chips_per_group[0],
      latency,
      failure_rate=_failure_rate(args, recorded),
      nbytes=nbytes or 0.0,
      network=network,
      **_times(args, recorded),
    )
    with bar.bar(f"planning for {args.chips:,} chips", 1) as shown:
      choice = scale.choose(
        fleet,
        group_sizes=args.chips_per_group,
        periods=args.periods,
        local_step_value=args.local_step_value,
        repetitions=min(args.repetitions, 3),
        seed=args.seed,
        progress=shown,
      )
  except ValueError as error:
    raise errors.CommandError(str(error)) from error
  title = f"{args.chips:,} chips, a step {latency}"
  _show(choice, title)
  if args.json:
    output_files.write_json(
      args.json,
      {
        "recommended": choice.recommended.report(),
        "runner_up": choice.runner_up and choice.runner_up.report(),
        "reason": choice.reason,
        "fleet": _report(fleet),
        "options": [option.report() for option in choice.options],
      },
    )
  if args.save:
    save(args.save, choice, title)
  output_files.tell(args.json, args.save)
  return 0


def _report(fleet) -> dict[str, Any]:
  """The plan's fleet as plain numbers; an infinite bandwidth is null."""
  names = [field.name for field in dataclasses.fields(fleet)]
  bandwidth = fleet.network.bandwidth
  return {name: getattr(fleet, name) for name in names} | {
    "step": str(fleet.step),
    "network": {
      "latency": fleet.network.latency,
      "bandwidth": bandwidth if math.isfinite(bandwidth) else None,
    },
  }


def _failure_rate(args: argparse.Namespace, recorded) -> float:
  """The failure rate of one chip, per second."""
  if args.chip_mtbf is None and recorded is not None and recorded.failures:
    return recorded.failures.rate / args.chips_per_group[0]
  return 1 / (3600 * (args.chip_mtbf or _MTBF))


def _times(args: argparse.Namespace, recorded) -> dict[str, float]:
  """The given times, else the journal's medians, else the defaults."""
  found = {}
  for name, (default, _) in _TIMES.items():
    field = name.replace("-", "_")
    seconds = getattr(args, field)
    if seconds is None and recorded is not None and name in _OF_FAULTS:
      told = [getattr(f, _OF_FAULTS[name]) for f in recorded.faults]
      known = [value for value in told if math.isfinite(value)]
      seconds = statistics.median(known) if known else None
    field = "save" if field == "save_pause" else field
    found[field] = default if seconds is None else seconds
  return found


def _show(choice, title: str) -> None:
  from optax_dist.cli import tables

  shown = tables.table(title)
  shown.add_column("strategy")
  columns = ("chips per group", "progress", "from", "to")
  causes = ("waiting", "exchanging", "dropped", "recovery", "idle")
  for name in (*columns, *causes):
    shown.add_column(name, justify="right")
  for option in choice.options:
    shown.add_row(
      option.name,
      f"{option.chips_per_group:,}",
      *(f"{x:.1%}" for x in (option.progress, option.low, option.high)),
      *(f"{option.outcome.share(cause):.1%}" for cause in causes),
      style="bold" if option is choice.recommended else None,
    )
  tables.show(shown)
  print(f"recommended: {_named(choice.recommended)}: {choice.reason}")
  if choice.runner_up is not None:
    print(f"runner-up: {_named(choice.runner_up)}")


def _named(option) -> str:
  text = f"{option.name}, {option.chips_per_group:,} chips in a group"
  if option.checkpoint_interval is not None and "every" not in text:
    text += f", a checkpoint every {option.checkpoint_interval:.4g} s"
  return f"{text} ({option.progress:.1%})"


def save(path: pathlib.Path, choice, title: str) -> None:
  """Draws how the chips' time is spent, with a bar for each option.

  Args:
    path: the output file.
    choice: the choice to draw.
    title: the title of the figure.

  Raises:
    errors.CommandError: the file can't be written.
  """
  from optax_dist.cli import panels
  from optax_dist.cli.runs import report_picture

  options = choice.options

  def draw(axes) -> None:
    rows = range(len(options))
    report_picture.stack(axes, rows, [option.outcome for option in options])
    for row, option in enumerate(options):
      axes.annotate(
        f"{option.progress:.1%}",
        (100, row),
        xytext=(6, 0),
        textcoords="offset points",
        va="center",
        fontweight="bold" if option is choice.recommended else None,
      )
    axes.set_yticks(
      rows,
      [f"{o.name}; {o.chips_per_group:,} a group" for o in options],
      fontsize=12,
    )
    axes.set_xlabel("share of the chips' time (%)")
    axes.set_title(f"Best: {_named(choice.recommended)}", loc="right")
    axes.grid(axis="y", visible=False)
    axes.legend(loc="upper center", bbox_to_anchor=(0.3, -0.14), ncols=4)

  height = 2.6 + 0.42 * len(options)
  panels.save(path, title, [draw], size=(13.0, height), inverted=1)
