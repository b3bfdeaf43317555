"""``optax-dist report``: how a run's time was spent."""

from __future__ import annotations

import argparse
import csv
import pathlib
from typing import Any

from optax_dist.cli import errors, installed, output_files, parser
from optax_dist.cli.runs import journal_file

_DESCRIPTION = """\
Tells where the time of a run went, from its journal: every second of every replica is
useful computing, waiting for others, exchanging, dropped work, compiling, starting,
recovery, or idle, and they add up to 100 %. With a second journal both are shown side
by side."""


def add_parser(commands) -> None:
  """Adds the ``report`` command to the commands of a parser."""
  command = parser.add_command(
    commands,
    "report",
    run,
    help="show how the time of a run was spent",
    description=_DESCRIPTION,
  )
  journal_file.add_argument(command)
  for flag, what in (
    ("--compare", "the journal of another run, shown next to it"),
    ("--json", "write all figures"),
    ("--csv", "write each stretch of each replica's time"),
    ("--save", "save a picture: the categories over time"),
  ):
    parser.add_file(command, flag, what)


def run(args: argparse.Namespace) -> int:
  """Runs the ``report`` command with its parsed arguments."""
  installed.check()
  output_files.check_writable(
    args.json, args.csv, picture=args.save, read=(args.journal, args.compare)
  )
  paths = [args.journal] + ([args.compare] if args.compare else [])
  names = _names(paths)
  ledgers = [_ledger(path) for path in paths]
  _show(names, ledgers)
  if args.json:
    reports = {
      str(path): _report(ledger)
      for path, ledger in zip(paths, ledgers, strict=True)
    }
    output_files.write_json(args.json, reports)
  if args.csv:
    _write_csv(args.csv, paths, ledgers)
  if args.save:
    from optax_dist.cli.runs import report_picture

    report_picture.save(
      args.save,
      list(zip(names, ledgers, strict=True)),
    )
  output_files.tell(args.json, args.csv, args.save)
  return 0


def _names(paths: list[pathlib.Path]) -> list[str]:
  """Short names that differ: most journals are called ``journal.jsonl``."""
  parts = [path.absolute().parts for path in paths]
  for count in range(1, max(map(len, parts))):
    names = [str(pathlib.Path(*some[-count:])) for some in parts]
    if len(set(names)) == len(names):
      return names
  return [str(path) for path in paths]


def _ledger(path: pathlib.Path):
  from optax_dist.coordinator.metrics import time_ledger

  try:
    return time_ledger.of(journal_file.read(path))
  except ValueError as error:
    raise errors.CommandError(f"{path}: {error}") from error


def _show(runs, ledgers) -> None:
  from optax_dist.cli import tables
  from optax_dist.coordinator.metrics import goodput

  one = len(ledgers) == 1
  title = "where the time went: " + " and ".join(runs)
  shown = tables.table(title)
  shown.add_column("")
  shown.add_column(runs[0] if not one else "all", justify="right")
  if one:
    # A table with many rows is of no use.
    names = ledgers[0].replicas[:12]
    for name in names:
      shown.add_column(f"{name}", justify="right")
  else:
    shown.add_column(runs[1], justify="right")
    shown.add_column("difference", justify="right")
  shown.add_column("is", style="dim")
  found = [ledger.goodput() for ledger in ledgers]
  each = [ledgers[0].goodput(name) for name in names] if one else []
  for category, what in goodput.CATEGORIES.items():
    shares = [f"{one_.share(category):.1%}" for one_ in (*found, *each)]
    if not one:
      difference = found[1].share(category) - found[0].share(category)
      shares.append(f"{100 * difference:+.1f} points")
    shown.add_row(category, *shares, what)
  tables.show(shown)
  for name, ledger, total in zip(runs, ledgers, found, strict=True):
    print(
      f"{name}: goodput {total.goodput:.1%} of {total.total:.4g}"
      f" replica-seconds, {len(ledger.replicas)} replicas for"
      f" {ledger.seconds:.4g} s"
    )


def _report(ledger) -> dict[str, Any]:
  return {
    "seconds": ledger.seconds,
    "goodput": ledger.goodput().report(),
    "replicas": {
      str(name): ledger.goodput(name).report() for name in ledger.replicas
    },
  }


def _write_csv(path: pathlib.Path, paths, ledgers) -> None:
  with output_files.writing(path), path.open("w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(["journal", "replica", "begin", "end", "category"])
    for name, ledger in zip(paths, ledgers, strict=True):
      for span in ledger.spans:
        writer.writerow([name, *span])
