"""``optax-dist watch``: a run of the coordinator, from its journal."""

from __future__ import annotations

import argparse
import contextlib
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
  command.add_argument(
    "--once", action="store_true", help="show it once, and exit"
  )
  parser.add_web(command, nargs="?", const=("127.0.0.1", 0))


def run(args: argparse.Namespace) -> int:
  """Runs the ``watch`` command with its parsed arguments."""
  with journal_file.reading(args.journal):
    args.journal.open("rb").close()
  from optax_dist.cli.runs import table as run_table

  if args.web is not None:
    _serve(args)
  else:
    live = run_table.Live(args.journal)
    live.read()
    if live.bad_lines and live.numbers.run is None:
      raise errors.CommandError(
        f"{args.journal}: is no journal: none of its {live.bad_lines} lines can"
        " be used"
      )
    if args.once:
      live.show()
    else:
      _follow(live)
    if live.bad_lines:
      parser.say(
        f"{args.journal}: bad lines: {live.bad_lines}; optax-dist report names"
        " them"
      )
  return 0


def _follow(live: Live) -> None:
  """Shows the run until its end, or Ctrl-C; without a terminal, only then."""
  with live:
    with contextlib.suppress(KeyboardInterrupt):
      live.update()
      while live.numbers.finish is None:
        time.sleep(_SLICE)
        live.update()
    live.update(force=True)
  if not live.is_terminal:
    live.show()


def _serve(args: argparse.Namespace) -> None:
  """Serves the page until Ctrl-C, also for a run that has ended."""
  from optax_dist.cli.runs.web import server
  from optax_dist.coordinator import journal_tail

  page = server.Server(journal_tail.Tail(args.journal), *args.web)
  print(f"serving {page.url} (Ctrl-C ends it)", flush=True)
  try:
    while True:
      time.sleep(_SLICE)
  except KeyboardInterrupt:
    pass
  finally:
    page.close()
