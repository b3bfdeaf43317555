"""Timings as a table."""

from __future__ import annotations

from collections.abc import Sequence

from optax_dist.cli import tables
from optax_dist.simulate.timing import Timing


def show(title: str, timings: Sequence[Timing]) -> None:
  """Prints a line for each simulation.

  Args:
    title: what they have in common.
    timings: of the simulations.
  """
  shown = tables.table(title)
  shown.add_column("strategy", no_wrap=True)
  for name in ("steps/s", "gradients/s", "dropped", "late by"):
    shown.add_column(name, justify="right")
  # Where the time went; nobody asks for what nobody had.
  causes = ["useful", "waiting", "stale"]
  causes += [
    cause
    for cause in ("communication", "lost", "down")
    if any(timing.shares()[cause] > 0 for timing in timings)
  ]
  for cause in causes:
    shown.add_column(cause, justify="right")
  shown.add_column("longest wait", justify="right")
  for timing in timings:
    shares = timing.shares()
    waits = timing.seconds["waiting"] / timing.duration
    shown.add_row(
      timing.strategy.name,
      f"{timing.steps_per_second:.4g}",
      f"{timing.gradients_per_second:.4g}",
      f"{timing.dropped_share:.1%}",
      f"{timing.mean_staleness:.3g}",
      *(f"{shares[cause]:.1%}" for cause in causes),
      f"{waits.max():.1%}",
    )
  tables.show(shown)
  print("dropped is of gradients; what is right of 'late by' is of time")
