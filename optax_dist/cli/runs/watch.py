"""``optax-dist watch``: a run of the coordinator, from its journal."""

from __future__ import annotations

import argparse
import pathlib
import time

from optax_dist.cli import installed, output_files, parser
from optax_dist.cli.runs import journal_file

_DESCRIPTION = """\
Shows a run from its journal, while it goes on or afterwards: steps per second, and
for each replica how many of its gradients were applied or dropped, how long it
computes and waits, when it was last heard from, and which one holds up the others.
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
    metavar="PORT",
    type=parser.whole_number(0, 65535),
    nargs="?",
    const=0,
    help="show it on a page in a browser, on this port or any that is free",
  )
  add(
    "--bind",
    metavar="ADDRESS",
    default="127.0.0.1",
    help="where the page is served; beyond loopback it needs the token that is"
    " printed with its address (default: %(default)s)",
  )
  what = "save a picture at the end: a timeline, drops and waits"
  parser.add_file(command, "--save", what)


def run(args: argparse.Namespace) -> int:
  """Runs the ``watch`` command with its parsed arguments."""
  installed.check()
  output_files.check_writable(picture=args.save, read=(args.journal,))
  with journal_file.reading(args.journal):
    args.journal.open("rb").close()
  from optax_dist.cli import tables
  from optax_dist.cli.runs import summary as run_summary
  from optax_dist.cli.runs import table as run_table
  from optax_dist.coordinator import journal, journal_tail

  if args.web is not None:
    _serve(args)
  elif args.once:
    summary = run_summary.RunSummary()
    tail = journal_tail.Tail(args.journal)
    summary.update(tail.read(), tail.age)
    tables.show(run_table.table(summary, width=tables.width()))
    _say_bad(args.journal, tail.bad_lines)
  else:
    with run_table.Live(args.journal) as live:
      try:
        live.update()
        while live.summary.finish is None:
          time.sleep(_SLICE)
          live.update()
      except KeyboardInterrupt:
        pass
      live.update(force=True)
    _say_bad(args.journal, live.bad_lines)
  if args.save:
    from optax_dist.cli.runs import timeline_picture

    parts = journal.segments(journal.read(args.journal).records)
    path = args.journal.absolute()
    title = path.parent.name if path.name == "journal.jsonl" else path.name
    timeline_picture.save(args.save, parts[-1] if parts else [], title)
    print(f"picture in {args.save}")
  return 0


def _say_bad(path: pathlib.Path, lines: int) -> None:
  if lines:
    parser.say(f"{path}: bad lines: {lines}; optax-dist report names them")


def _serve(args: argparse.Namespace) -> None:
  """Serves the page until Ctrl-C, also for a run that has ended."""
  from optax_dist.cli.runs.web import server
  from optax_dist.coordinator import journal_tail

  page = server.Server(
    journal_tail.Tail(args.journal), bind=args.bind, port=args.web
  )
  print(f"serving {page.url} (Ctrl-C ends it)", flush=True)
  try:
    while True:
      time.sleep(_SLICE)
  except KeyboardInterrupt:
    pass
  finally:
    page.close()
