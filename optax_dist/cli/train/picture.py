"""The picture of a run: its loss and its accuracy."""

import pathlib
from collections.abc import Callable, Sequence

import matplotlib.axes
import matplotlib.layout_engine
import matplotlib.ticker
import numpy as np

from optax_dist.cli import panels
from optax_dist.cli.train import strategy

Panel = Callable[[matplotlib.axes.Axes, Sequence[strategy.Record]], None]

LOSS, ACCURACY, SPREAD = "#2563a8", "#c2571a", "#3f7d4f"


def save(
  path: pathlib.Path,
  records: Sequence[strategy.Record],
  title: str,
  further: Sequence[Panel] = (),
) -> None:
  """Draws a run and saves the picture as PNG.

  Args:
    path: the output file.
    records: the run's metrics, one record per step.
    title: describes the run.
    further: functions that draw more panels, to the right of loss and accuracy.

  Raises:
    errors.CommandError: if the file can't be written.
  """

  def on_records(draw: Panel) -> Callable[[matplotlib.axes.Axes], None]:
    return lambda axes: draw(axes, records)

  panels.save(
    path,
    title,
    [on_records(draw) for draw in (_draw_loss, _draw_accuracy, *further)],
    size=(6.2, 4.9),
    dpi=110,
    layout=matplotlib.layout_engine.ConstrainedLayoutEngine(
      w_pad=0.12, h_pad=0.12, wspace=0.03
    ),
  )


def epochs_passed(records: Sequence[strategy.Record]) -> np.ndarray:
  """How many passes over the data were complete after each record's step."""
  # Not a count of the first epoch's: a resumed run may lack some of them.
  steps_per_epoch = max(record["step"] / record["epoch"] for record in records)
  return np.array([record["step"] / steps_per_epoch for record in records])


def label_epochs(axes: matplotlib.axes.Axes) -> None:
  """Labels a horizontal axis in :func:`epochs_passed`."""
  axes.set_xlabel("epoch (passes over the training images)")
  axes.xaxis.set_major_locator(
    matplotlib.ticker.MaxNLocator(5, steps=[1, 2, 5, 10], integer=True)
  )
  axes.set_xlim(left=0)


def _draw_loss(
  axes: matplotlib.axes.Axes, records: Sequence[strategy.Record]
) -> None:
  epochs = epochs_passed(records)
  losses = np.array([record["loss"] for record in records])
  axes.plot(
    epochs, losses, color=LOSS, alpha=0.3, linewidth=1, label="each step"
  )
  of_epoch = np.array([record["epoch"] for record in records])
  ends = np.unique(of_epoch)
  means = [losses[of_epoch == end].mean() for end in ends]
  axes.plot(ends - 0.5, means, color=LOSS, label="mean over an epoch")
  axes.set_yscale("log")
  axes.yaxis.set_major_formatter(matplotlib.ticker.StrMethodFormatter("{x:g}"))
  axes.set_title("Training loss")
  axes.set_ylabel("cross-entropy (nats)")
  axes.legend(loc="upper right")
  label_epochs(axes)


def _draw_accuracy(
  axes: matplotlib.axes.Axes, records: Sequence[strategy.Record]
) -> None:
  evaluated = [record for record in records if "test_accuracy" in record]
  epochs = [record["epoch"] for record in evaluated]
  percent = [100 * record["test_accuracy"] for record in evaluated]
  by_replica = [
    record["replica_test_accuracy"]
    for record in evaluated
    if "replica_test_accuracy" in record
  ]
  lowest = percent
  if by_replica:
    lowest = [100 * min(accuracies) for accuracies in by_replica]
    highest = [100 * max(accuracies) for accuracies in by_replica]
    axes.fill_between(
      epochs, lowest, highest, color=SPREAD, alpha=0.3, label="replicas, range"
    )
  label = "center" if by_replica else None
  axes.plot(
    epochs, percent, color=ACCURACY, marker="o", markersize=6, label=label
  )
  if label:
    axes.legend(loc="lower right")
  if percent:
    axes.annotate(
      f"{percent[-1]:.1f} %",
      (epochs[-1], percent[-1]),
      xytext=(0, -14),
      textcoords="offset points",
      ha="right",
      va="top",
      color=ACCURACY,
      fontweight="bold",
      fontsize=17,
    )
  axes.set_title("Test accuracy")
  axes.set_ylabel("correct test images (%)")
  axes.yaxis.set_major_locator(
    matplotlib.ticker.MaxNLocator(6, steps=[1, 2, 5])
  )
  axes.set_ylim(bottom=min([*percent, *lowest, 90]) - 1, top=100.5)
  label_epochs(axes)
