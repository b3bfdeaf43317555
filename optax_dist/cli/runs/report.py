"""``optax-dist report``: how a run's time was spent."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING

from optax_dist.cli import errors, parser
from optax_dist.cli.runs import journal_file

if TYPE_CHECKING:
  from optax_dist.coordinator.metrics import losses

_DESCRIPTION = """\
Tells where the time of a run went, from its journal: every second of every
replica is useful computing, waiting for others, exchanging, dropped work,
compiling, starting, recovery, or idle, and they add up to 100 %. If replicas
were lost, it also tells what was kept, and what each loss has cost."""

# A table with many columns is of no use.
_REPLICAS = 12
# The width, in characters, of a category's description, and of a column of shares.
_IS, _SHARE = 72, 8


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


def run(args: argparse.Namespace) -> int:
  """Runs the ``report`` command with its parsed arguments."""
  from optax_dist.cli import tables
  from optax_dist.coordinator import journal
  from optax_dist.coordinator.metrics import losses, time_ledger

  records = journal_file.read(args.journal)
  try:
    ledger = time_ledger.of(records)
  except ValueError as error:
    raise errors.CommandError(f"{args.journal}: {error}") from error
  total = ledger.goodput()
  each = {f"{name}": ledger.goodput(name) for name in ledger.replicas}
  columns = {"all": total} | dict(list(each.items())[:_REPLICAS])
  rows = [
    {
      name: f"{goodput.share(category):.1%}"
      for name, goodput in columns.items()
    }
    | {"time": category, "is": what}
    for category, what in time_ledger.CATEGORIES.items()
  ]
  title = f"where the time went: {args.journal}"
  runs = len(journal.segments(records))
  if runs > 1:
    title += f", the last of {runs} runs"
  names = ["time", *columns]
  if tables.width(sys.stdout) >= _IS + _SHARE * len(columns):
    names.append("is")
  print(tables.text(title, names, rows, words=("time", "is")))
  print(
    f"goodput {total.goodput:.1%} of {total.total:.4g} replica-seconds,"
    f" {len(each)} replicas for {ledger.end:.4g} s"
  )
  cost = losses.of(records)
  if cost is not None:
    print(_sentence(cost))
  return 0


def _sentence(cost: losses.Losses) -> str:
  """The cost of losses, as a sentence."""
  count = (
    f"{cost.losses} {'loss' if cost.losses == 1 else 'losses'} of a replica"
  )
  if cost.kept > 1:
    return (
      "kept at least 100% of the useful computing of a run without losses: after"
      f" {count}, the others waited less, or fewer of their gradients were dropped"
    )
  return (
    f"kept {cost.kept:.1%} of the useful computing of a run without losses"
    f" ({cost.bound:.1%} if only absence counts); {count}, {cost.each:.4g}"
    " replica-seconds each"
  )
