"""The picture of a report: the replicas' time by category."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.axes
import numpy as np

from optax_dist.cli import panels
from optax_dist.coordinator.metrics.goodput import CATEGORIES, Goodput
from optax_dist.coordinator.metrics.time_ledger import Ledger

COLORS = {
  "useful": "#3f7d4f",
  "waiting": "#e0b23c",
  "exchanging": "#4a6fa5",
  "dropped": "#c2571a",
  "compile": "#8f6bb3",
  "start": "#b9a7cf",
  "recovery": "#7a1f3d",
  "idle": "#d5dae1",
}
_BINS = 120


def save(path: pathlib.Path, runs: Sequence[tuple[str, Ledger]]) -> None:
  """Draws a panel for each run and saves them.

  Args:
    path: the output file.
    runs: the name and the ledger of each run.

  Raises:
    errors.CommandError: the file can't be written.
  """
  panels.save(
    path,
    "Where the time went",
    [
      lambda axes, name=name, ledger=ledger: draw(axes, name, ledger)  # type: ignore[misc]
      for name, ledger in runs
    ],
    size=(9.0, 5.4),
  )


def stack(
  axes: matplotlib.axes.Axes, rows: Sequence[Any], found: Sequence[Goodput]
) -> None:
  """Draws a bar for each row: the shares of the categories, in percent."""
  left = np.zeros(len(rows))
  for category, color in COLORS.items():
    shares = np.array([100 * one.share(category) for one in found])
    if shares.max() >= 0.05:
      axes.barh(rows, shares, left=left, color=color, label=category)
    left += shares
  axes.set_xlim(0, 100)


def draw(axes: matplotlib.axes.Axes, name: str, ledger: Ledger) -> None:
  """Draws the categories of one run over its time."""
  edges, found = ledger.over_time(_BINS)
  total = ledger.goodput()
  # Drawn as steps, to show no values in between.
  shown = [c for c in CATEGORIES if total.seconds[c] > 0]
  axes.stackplot(
    edges[:-1],
    [found[c] for c in shown],
    step="post",
    labels=[f"{c}, {total.share(c):.1%}" for c in shown],
    colors=[COLORS[c] for c in shown],
    linewidth=0,
  )
  axes.set_xlim(0, edges[-2])
  axes.set_ylim(0, len(ledger.replicas))
  axes.set_title(f"{name}: {total.goodput:.1%} useful", parse_math=False)
  axes.set_xlabel("seconds")
  axes.set_ylabel("replicas")
  handles, labels = axes.get_legend_handles_labels()
  axes.legend(
    handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.0, 0.5)
  )
