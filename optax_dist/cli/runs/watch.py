"""``optax-dist watch``: a run of the coordinator, from its journal."""

from __future__ import annotations

import argparse
import contextlib
import pathlib
import time
from typing import TYPE_CHECKING

from optax_dist.cli import errors, parser
from optax_dist.cli.runs import journal_file

if TYPE_CHECKING:  # Slow to import: see optax_dist.cli.
  from optax_dist.cli.runs.table import Live

_DESCRIPTION = """\
Shows a run from its journal, while it goes on or afterwards: steps per second, and
for each replica how many of its gradients were applied or dropped, how long it
computes and waits, when it was last seen, and which ones the others wait for.
Ends with the run, or at Ctrl-C."""

_SLICE = 0.25


def add_parser(commands) -> None:
  """Adds the ``watch`` command to the commands of a parser."""
  command = parser.add_command(
    commands,
    "watch",
    run,
    help="show a run of the coordinator live",
    description=_DESCRIPTION,
  )
  journal_file.add_argument(command)
  add = command.add_argument
  add("--once", action="store_true", help="show it once, and exit")
  add(
    "--web",
    metavar="[ADDRESS:]PORT",
    nargs="?",
    const=("127.0.0.1", 0),
    type=_address,
    help="serve the run, until Ctrl-C, on a page for browsers, and metrics for"
    " Prometheus at /metrics, on this port, or on any that is free (0); on loopback"
    " unless there is an address, where the page then needs the token that is"
    " printed, and the metrics do not",
  )
  add(
    "--tensorboard",
    metavar="DIR",
    type=pathlib.Path,
    help="folder to write the run's metrics to, for TensorBoard",
  )


def _address(text: str) -> tuple[str, int]:
  bind, _, port = text.rpartition(":")
  if not port.isdecimal() or int(port) > 65535:
    raise argparse.ArgumentTypeError(
      f"must be PORT or ADDRESS:PORT, with a port from 0 to 65535, got {text!r}"
    )
  return bind.strip("[]") or "127.0.0.1", int(port)


def run(args: argparse.Namespace) -> int:
  """Runs the ``watch`` command with its parsed arguments."""
  with journal_file.reading(args.journal):
    args.journal.open("rb").close()
  # Slow imports follow.
  from optax_dist.cli.runs import table as run_table

  live = run_table.Live(args.journal)
  live.read()
  if live.bad_lines and live.numbers.run is None:
    raise errors.CommandError(
      f"{args.journal}: is no journal: none of its {live.bad_lines} lines can be"
      " used"
    )
  if args.once:
    live.show()
  else:
    _follow(args, live)
  if live.bad_lines:
    parser.say(
      f"{args.journal}: bad lines: {live.bad_lines}; optax-dist report names them"
    )
  return 0


def _follow(args: argparse.Namespace, live: Live) -> None:
  """Shows the run until its end, or Ctrl-C; without a terminal, only then."""
  updates = [live.update]
  with contextlib.ExitStack() as stack:
    if args.tensorboard is not None:
      from optax_dist.coordinator.metrics import tensorboard

      try:
        points = tensorboard.Points(args.journal, args.tensorboard)
      except OSError as error:
        raise errors.CommandError(f"--tensorboard: {error.strerror}") from error
      stack.callback(points.close)
      updates.append(points.update)
    if args.web is not None:
      from optax_dist.cli.runs.web import server
      from optax_dist.coordinator import journal_tail

      page = server.Server(journal_tail.Tail(args.journal), *args.web)
      stack.callback(page.close)
      urls = f"{page.url} and {page.metrics_url}"
      print(f"serving {urls} (Ctrl-C ends it)", flush=True)
    stack.enter_context(live)
    with contextlib.suppress(KeyboardInterrupt):
      while args.web is not None or live.numbers.finish is None:
        for update in updates:
          update()
        time.sleep(_SLICE)
    live.read()
  if not live.is_terminal:
    live.show()
