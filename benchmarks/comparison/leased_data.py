"""The cost of leasing samples per step, with and without the ledger."""

import argparse
from collections.abc import Iterator

import side_by_side
from side_by_side import Line

PARAMS = (1_000,)


def lines(args: argparse.Namespace) -> Iterator[Line]:
  """Yields the ratios of time and of processor time, size by size."""
  for params in args.params or PARAMS:
    common = {"params": params, "seconds": args.seconds}
    runs = side_by_side.in_turns(
      {
        "leased": ("replicas.py", {**common, "data": True}),
        "own": ("replicas.py", common),
      },
      args.repeats,
    )
    for key, what in (
      ("seconds_per_step", "time"),
      ("cpu_seconds_per_step", "processor time"),
    ):
      yield side_by_side.against(
        f"{params:,} parameters, {what} of a step with leased samples",
        "s",
        side_by_side.values(runs["leased"], key),
        "with data of its own",
        side_by_side.values(runs["own"], key),
      )
