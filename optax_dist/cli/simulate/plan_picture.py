"""The picture of a plan: progress against the gradients in a step."""

from __future__ import annotations

import pathlib

import matplotlib.axes
import matplotlib.ticker

from optax_dist.cli import panels
from optax_dist.simulate.plan import Plan

_PROGRESS, _BEST, _PACE = "#2563a8", "#c2571a", "#3f7d4f"


def save(path: pathlib.Path, plan: Plan, title: str) -> None:
  """Draws a plan and saves the picture as PNG.

  Args:
    path: the output file.
    plan: the plan to draw.
    title: the title of the figure.

  Raises:
    errors.CommandError: the file can't be written.
  """
  ks = [row.replicas_to_aggregate for row in plan.candidates]
  best = plan.recommended

  def label(axes: matplotlib.axes.Axes) -> None:
    axes.set_xlabel("replicas_to_aggregate")
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(6, integer=True))

  def progress(axes: matplotlib.axes.Axes) -> None:
    axes.fill_between(
      ks,
      [row.low for row in plan.candidates],
      [row.high for row in plan.candidates],
      color=_PROGRESS,
      alpha=0.25,
      label="95 % of the repetitions",
    )
    axes.plot(ks, [row.progress for row in plan.candidates], color=_PROGRESS)
    axes.axvspan(
      plan.best_low - 0.4,
      plan.best_high + 0.4,
      color=_PACE,
      alpha=0.2,
      label="best in 95 % of them",
    )
    k = best.replicas_to_aggregate
    axes.plot([k], [best.progress], "o", color=_BEST, markersize=9)
    axes.annotate(
      f"{k} of {plan.replicas}",
      (k, best.progress),
      xytext=(0, -16),
      textcoords="offset points",
      ha="center",
      va="top",
      color=_BEST,
      fontweight="bold",
    )
    axes.set_title("Progress")
    axes.set_ylabel("in steps from all replicas, per second")
    axes.set_ylim(bottom=0)
    axes.legend(loc="lower center")
    label(axes)

  def pace(axes: matplotlib.axes.Axes) -> None:
    rates = [row.steps_per_second for row in plan.candidates]
    axes.plot(ks, rates, color=_PACE, label="steps per second")
    axes.set_yscale("log")
    axes.set_title("Pace and waste")
    axes.set_ylabel("steps per second", color=_PACE)
    wasted = axes.twinx()
    wasted.plot(ks, [100 * row.wasted for row in plan.candidates], color=_BEST)
    wasted.set_ylabel("wasted work (%)", color=_BEST)
    wasted.set_ylim(bottom=0)
    wasted.grid(False)
    label(axes)

  panels.save(path, title, [progress, pace])
