"""A progress bar on standard error, for work without metrics to show."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

import rich.console
import rich.progress


@contextlib.contextmanager
def bar(
  description: str,
  total: float,
  console: rich.console.Console | None = None,
) -> Iterator[Callable[[float], None]]:
  """Shows a bar inside the context; nothing if there is no terminal.

  Args:
    description: what is in progress.
    total: the amount of work.
    console: the console to show it on.

  Yields:
    A function to call with the amount done.

  Example:
    >>> with bar("counting", 3) as done:
    ...   done(2)
  """
  console = console or rich.console.Console(stderr=True)
  shown = rich.progress.Progress(
    rich.progress.TextColumn("{task.description}"),
    rich.progress.BarColumn(bar_width=None),
    rich.progress.TaskProgressColumn(),
    rich.progress.TimeRemainingColumn(compact=True),
    console=console,
    expand=True,
    transient=True,
    disable=not console.is_terminal,
  )
  task = shown.add_task(description, total=total)
  with shown:
    yield lambda done: shown.update(task, completed=done)
