"""A run as a table."""

from __future__ import annotations

from optax_dist.cli import parser, tables
from optax_dist.coordinator.metrics.run_numbers import RunNumbers
from optax_dist.quorum.events import ordered

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
_WORDS = ("replica", "state", "process", "ended", "dropped as")


def table(numbers: RunNumbers, width: int) -> str:
  """The current state of a run.

  Args:
    numbers: the numbers of its journal.
    width: width of the terminal, in characters; a narrow one hides the least
      important columns.
  """
  title = f"step {numbers.step:,}, {numbers.rate():.1f} steps/s"
  if numbers.restarts:
    title += f", coordinator restarts: {numbers.restarts}"
  if numbers.abandoned:
    title += f", {numbers.abandoned} aggregation rounds abandoned"
  if numbers.finish is not None:
    title += f"; ended: {numbers.finish['reason']}"
  now = numbers.now()
  rows = []
  for number in ordered(numbers.replicas):
    replica = numbers.replicas[number]
    computed = replica.computed
    cells = {
      "replica": f"{number}",
      "state": replica.state,
      "accepted": f"{replica.accepted:,}",
      "dropped": f"{replica.dropped.total():,}",
      "lost": f"{replica.losses}",
      "compute": "" if computed is None else f"{1000 * computed:.0f} ms",
      "wait": f"{1000 * replica.wait:.0f} ms",
      "last seen": f"{max(0.0, now - replica.seen):.1f} s ago",
      "process": replica.process,
      "ended": replica.ended,
      "dropped as": ", ".join(
        f"{n} {reason}" for reason, n in replica.dropped.most_common(3)
      ),
    }
    rows.append(cells)
  names = [name for name, needs in _COLUMNS.items() if width >= needs]
  shown = tables.text(title, names, rows, _WORDS)
  trouble = numbers.trouble()
  if trouble:
    shown += f"\n{parser.plain(trouble)}"
  return shown
