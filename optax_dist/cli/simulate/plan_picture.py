"""The picture of a plan: progress against the gradients in a step."""

from __future__ import annotations

import pathlib

import matplotlib.axes
import matplotlib.ticker

from optax_dist.cli import panels
from optax_dist.simulate.plan import Plan


def save(path: pathlib.Path, plan: Plan, title: str) -> None:
  """Draws a plan and saves the picture.

  Args:
    path: the output file.
    plan: the plan to draw.
    title: the title of the figure.

  Raises:
    errors.CommandError: the file can't be written.
  """
  ks = [row.replicas_to_aggregate for row in plan.candidates]
  low = [row.low for row in plan.candidates]
  high = [row.high for row in plan.candidates]
  best = plan.recommended

  def draw(axes: matplotlib.axes.Axes) -> None:
    axes.fill_between(ks, low, high, alpha=0.25, label="95 % of repetitions")
    axes.plot(ks, [row.progress for row in plan.candidates])
    at = best.replicas_to_aggregate, best.progress
    axes.plot(*at, "o", label=f"best: {at[0]} of {plan.replicas}")
    axes.set_title("Progress")
    axes.set_xlabel("replicas_to_aggregate")
    axes.set_ylabel("in steps from all replicas, per second")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, integer=True))
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower center")

  panels.save(path, title, [draw])
