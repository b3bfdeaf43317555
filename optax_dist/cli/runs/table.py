"""A run as a table, optionally updated live."""

from __future__ import annotations

import pathlib
import time

import rich.console
import rich.live
import rich.table
import rich.text

from optax_dist.cli import tables
from optax_dist.cli.runs import own_metrics
from optax_dist.coordinator.journal_tail import Tail
from optax_dist.coordinator.metrics.run_numbers import RunNumbers
from optax_dist.quorum.events import ordered

_PER_SECOND = 4
# Minimum terminal width at which each column is shown.
_COLUMNS = {
  "replica": 0,
  "state": 0,
  "accepted": 0,
  "dropped": 0,
  "lost": 70,
  "compute": 80,
  "wait": 80,
  "last seen": 56,
  "process": 100,
  "ended": 110,
  "dropped as": 130,
}


def table(
  numbers: RunNumbers, width: int = 140, reported: str = ""
) -> rich.table.Table:
  """The current state of a run.

  Args:
    numbers: those of its journal.
    width: width of the terminal, in characters; a narrow one hides the least
      important columns.
    reported: what the run's own script reports.
  """
  title = f"step {numbers.step:,}, {numbers.rate():.1f} steps/s"
  if reported:
    title += f", {reported}"
  if numbers.leader is not None:
    title += f", leader {numbers.leader} (term {numbers.terms})"
  if numbers.abandoned:
    title += f", {numbers.abandoned} attempts abandoned"
  if numbers.finish is not None:
    title += f"; ended: {numbers.finish['reason']}"
  shown = tables.table(title)
  names = [name for name, needs in _COLUMNS.items() if width >= needs]
  for name in names:
    text = name in ("replica", "state", "process", "ended", "dropped as")
    shown.add_column(name, justify="left" if text else "right", no_wrap=True)
  now = numbers.now()
  for number in ordered(numbers.replicas):
    one = numbers.replicas[number]
    computed = one.computed
    cells = {
      "replica": f"{number}",
      "state": one.state,
      "accepted": f"{one.accepted:,}",
      "dropped": f"{one.dropped.total():,}",
      "lost": f"{one.losses}",
      "compute": "" if computed is None else f"{1000 * computed:.0f} ms",
      "wait": f"{1000 * one.wait:.0f} ms",
      "last seen": f"{max(0.0, now - one.seen):.1f} s ago",
      "process": one.process,
      "ended": one.ended,
      "dropped as": ", ".join(
        f"{n} {reason}" for reason, n in one.dropped.most_common(3)
      ),
    }
    shown.add_row(*(cells[name] for name in names))
  awaited = numbers.waiting_for()
  shown.caption = rich.text.Text(
    f"waiting for {awaited}" if awaited else "", style="bold red"
  )
  shown.caption_justify = "left"
  return shown


class Live:
  """Follows a journal, and shows a table on a terminal.

  Use it as a context manager, and call `update` often.
  """

  def __init__(
    self, path: pathlib.Path, console: rich.console.Console | None = None
  ):
    """Sets the journal, which need not exist yet; see `Tail`."""
    self.numbers = RunNumbers()
    self._reported = ""
    self._tail = Tail(path)
    self._console = console or tables.plain(stderr=True)
    self._live = rich.live.Live(
      console=self._console, auto_refresh=False, transient=False
    )
    self._next = 0.0

  @property
  def is_terminal(self) -> bool:
    """Whether the table is shown while the run goes on."""
    return self._console.is_terminal

  @property
  def bad_lines(self) -> int:
    """How many lines of the journal could not be read."""
    return self._tail.bad_lines

  def read(self) -> None:
    """Reads what is new in the journal, and what the script reports."""
    self.numbers.update(self._tail.read(), self._tail.age)
    self._reported = own_metrics.latest(self._tail.path)

  def show(self) -> None:
    """Shows what was read as a table, on standard output."""
    tables.show(table(self.numbers, tables.width(), self._reported))

  def update(self, force: bool = False) -> None:
    """Shows the current state, if it is time for it."""
    self.read()
    now = time.monotonic()
    if self._console.is_terminal and (force or now >= self._next):
      self._next = now + 1 / _PER_SECOND
      shown = table(self.numbers, self._console.width, self._reported)
      self._live.update(shown, refresh=True)

  def __enter__(self) -> Live:
    if self._console.is_terminal:
      self._live.start()
    return self

  def __exit__(self, *exception: object) -> None:
    if self._console.is_terminal:
      self.update(force=True)
      self._live.stop()
