"""The picture of timings: how the replicas' time is spent."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence

import matplotlib.axes
import numpy as np

from optax_dist.cli import panels
from optax_dist.cli.runs import report_picture
from optax_dist.simulate.timing import Timing


def save(path: pathlib.Path, timings: Sequence[Timing], title: str) -> None:
  """Draws the timings of several strategies and saves the picture as PNG.

  Args:
    path: the output file.
    timings: one timing per strategy.
    title: the title of the figure.

  Raises:
    errors.CommandError: the file can't be written.
  """
  names = [timing.strategy.name for timing in timings]
  # The second and third panel use the same colors.
  colors = [f"C{i % 10}" for i in range(len(timings))]

  def categories(axes: matplotlib.axes.Axes) -> None:
    report_picture.stack(axes, names, [t.goodput() for t in timings])
    axes.set_xlabel("share of all replicas' time (%)")
    axes.set_title("Where the time goes")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)

  def rates(axes: matplotlib.axes.Axes) -> None:
    values = [timing.gradients_per_second for timing in timings]
    bars = axes.barh(names, values, color=colors)
    axes.bar_label(bars, fmt="%.4g", padding=4)
    axes.margins(x=0.2)
    axes.set_yticks(range(len(names)), [""] * len(names))
    axes.set_xlabel("gradients per second")
    axes.set_title("Gradients applied")

  def waits(axes: matplotlib.axes.Axes) -> None:
    for timing, color in zip(timings, colors, strict=True):
      share = np.sort(100 * timing.seconds["waiting"] / timing.duration)
      replicas = np.linspace(0, 100, share.size)
      axes.plot(replicas, share, color=color)
    axes.set_xlabel("replicas, by how long they wait (%)")
    axes.set_ylabel("share of its time (%)")
    axes.set_title("Wait of each replica")
    axes.set_ylim(bottom=0)

  panels.save(path, title, [categories, rates, waits], inverted=2)
