"""``optax-dist watch``: a run of the coordinator, from its journal."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from typing import IO, TYPE_CHECKING

from optax_dist.cli import errors, parser, tables
from optax_dist.cli.runs import journal_file

if TYPE_CHECKING:  # Slow to import: see optax_dist.cli.
  from optax_dist.cli.runs.view import View

_DESCRIPTION = """\
Shows a run from its journal, while it goes on or afterwards: steps per
second, and for each replica how many of its gradients were applied or
dropped, how long it computes and waits, when it was last seen, and which ones
the others wait for. Ends with the run, or at Ctrl-C."""

_POLL_SECONDS = 0.5
_CLEAR = "\x1b[2J\x1b[H"  # Clears a terminal.


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
  from optax_dist.cli.runs import view  # Slow.

  shown = view.View(args.journal)
  shown.read()
  bad = shown.tail.bad_lines
  if bad and shown.numbers.is_empty:
    raise errors.CommandError(
      f"{args.journal}: is no journal: none of its {bad} lines can be used"
    )
  if not args.once:
    _follow(args, shown)
  if args.once or not sys.stderr.isatty():
    print(_table(shown, sys.stdout))
  bad = shown.tail.bad_lines
  if bad:
    parser.say(
      f"{args.journal}: bad lines: {bad}; optax-dist report names them"
    )
  return 0


def _follow(args: argparse.Namespace, shown: View) -> None:
  """Follows the run until its end, or Ctrl-C; shows it on a terminal."""
  with contextlib.ExitStack() as stack:
    served = ""
    if args.web is not None:
      from optax_dist.cli.runs.web import server

      page = server.Server(shown, *args.web)
      stack.callback(page.close)
      served = f"serving {page.url} and {page.metrics_url} (Ctrl-C ends it)"
      print(served, flush=True)
    with contextlib.suppress(KeyboardInterrupt):
      while True:
        is_shown = sys.stderr.isatty()
        with shown.lock:
          shown.read()
          table = _table(shown, sys.stderr) if is_shown else ""
        if is_shown:
          print(f"{_CLEAR}{table}\n{served}", file=sys.stderr, flush=True)
        if args.web is None and shown.numbers.finish is not None:
          break
        time.sleep(_POLL_SECONDS)
    with shown.lock:
      shown.read()


def _table(shown: View, stream: IO[str]) -> str:
  from optax_dist.cli.runs import table

  if shown.numbers.is_empty:
    return shown.unwritten
  return table.table(shown.numbers, tables.width(stream))
