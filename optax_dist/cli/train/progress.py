"""The progress of a run: a bar, or plain lines if there is no terminal."""

import math

import rich.console
import rich.progress

from optax_dist.cli.train import strategy

_PLAIN_LINES = 20  # At most, per run.
_SMOOTHING = 0.9


class Progress:
  """Shows a run's progress on standard error. Use it as a context manager.

  Example:
    >>> with Progress(epochs=1, steps=2) as progress:
    ...   progress.message("compiling")
    ...   progress.show({"epoch": 1, "loss": 0.5, "samples_per_second": 9.0})
  """

  def __init__(
    self,
    epochs: int,
    steps: int,
    console: rich.console.Console | None = None,
  ):
    """Creates a bar that is not shown yet.

    Args:
      epochs: passes over the data in the run.
      steps: steps in the run.
      console: the console to show it on.
    """
    self._console = console or rich.console.Console(
      stderr=True, highlight=False
    )
    self._epochs = epochs
    self._every = math.ceil(epochs / _PLAIN_LINES)
    self._throughput: float | None = None
    self._accuracy: float | None = None
    self._bar = rich.progress.Progress(
      rich.progress.TextColumn("{task.description}"),
      rich.progress.BarColumn(bar_width=None),
      rich.progress.TextColumn("{task.fields[figures]}"),
      rich.progress.TimeRemainingColumn(
        compact=True, elapsed_when_finished=True
      ),
      console=self._console,
      refresh_per_second=8,
      expand=True,
      disable=not self._console.is_terminal,
    )
    self._task = self._bar.add_task("", total=steps, figures="")

  def message(self, text: str) -> None:
    """Shows a message before the first step."""
    if self._bar.disable:
      self._console.print(text, soft_wrap=True)
    else:
      self._bar.update(self._task, description=text)

  def show(self, record: strategy.Record) -> None:
    """Shows a completed step."""
    throughput = record["samples_per_second"]
    if self._throughput is None:
      self._throughput = throughput
    self._throughput += (1 - _SMOOTHING) * (throughput - self._throughput)
    evaluated = "test_accuracy" in record
    if evaluated:
      self._accuracy = record["test_accuracy"]
    figures = [
      f"loss {record['loss']:.4f}",
      f"{self._throughput:,.0f} images/s",
    ]
    if self._accuracy is not None:
      figures.insert(1, f"test {self._accuracy:.1%}")
    epoch = record["epoch"]
    where = f"epoch {epoch:{len(str(self._epochs))}}/{self._epochs}"
    if not self._bar.disable:
      self._bar.update(
        self._task, advance=1, description=where, figures="  ".join(figures)
      )
    elif evaluated and (epoch % self._every == 0 or epoch == self._epochs):
      self._console.print(f"{where}  {'  '.join(figures)}", soft_wrap=True)

  def __enter__(self) -> "Progress":
    self._bar.start()
    return self

  def __exit__(self, *exception) -> None:
    self._bar.stop()
