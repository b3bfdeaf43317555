"""Timings as a table."""

from __future__ import annotations

from collections.abc import Sequence

from optax_dist.cli import tables
from optax_dist.simulate.timing import Timing


def show(title: str, timings: Sequence[Timing]) -> None:
  """Prints a line for each simulation.

  Args:
    title: the title of the table.
    timings: the simulations' timings.
  """
  shown = tables.table(title)
  shown.add_column("strategy", no_wrap=True)
  for name in ("steps/s", "gradients/s", "gradients dropped", "staleness"):
    shown.add_column(name, justify="right")
  # The same categories as in `optax-dist report`, without those that are zero
  # everywhere, and without the unfinished time at the end.
  found = [timing.goodput() for timing in timings]
  categories = ["useful", "waiting", "dropped"]
  categories += [
    category
    for category in ("exchanging", "recovery")
    if any(one.seconds[category] > 0 for one in found)
  ]
  for category in categories:
    shown.add_column(category, justify="right")
  shown.add_column("longest wait", justify="right")
  for timing, one in zip(timings, found, strict=True):
    waits = timing.seconds["waiting"] / timing.duration
    shown.add_row(
      timing.strategy.name,
      f"{timing.steps_per_second:.4g}",
      f"{timing.gradients_per_second:.4g}",
      f"{timing.dropped_share:.1%}",
      f"{timing.mean_staleness:.3g}",
      *(f"{one.share(category):.1%}" for category in categories),
      f"{waits.max():.1%}",
    )
  tables.show(shown)
  print("the columns after 'staleness' are shares of time")
