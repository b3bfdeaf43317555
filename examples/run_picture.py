"""The picture of a run: a timeline of each replica, and what became of its gradients.

    python examples/run_picture.py runs/killed/journal.jsonl timeline.png

It reads the journal of a launched run. The picture's name ends in .png, .svg or .pdf.
"""

import argparse
import pathlib

import matplotlib.figure
import matplotlib.style
import numpy as np

from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics import time_ledger

_INK, _GRID, _LOST = "#1f2933", "#e4e7eb", "#8a3ffc"
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
# A color for each reason, equal in all pictures; losses are never green.
_REASONS = {
  "applied": COLORS["useful"],
  "stale": COLORS["dropped"],
  "lost": _LOST,
  "abandoned": "#7a5c45",
  "non_finite": "#b3123c",
}
_OTHER = "#8a94a6"
# Columns of a timeline: about as many as it has pixels.
_COLUMNS = 500
# Readable at half the size, where 17 points become 8.5.
_STYLE = {
  "font.size": 17,
  "axes.titlesize": 18,
  "axes.titlelocation": "left",
  "axes.titlepad": 12,
  "axes.labelpad": 7,
  "axes.spines.top": False,
  "axes.spines.right": False,
  "axes.edgecolor": _INK,
  "axes.labelcolor": _INK,
  "axes.titlecolor": _INK,
  "axes.axisbelow": True,
  "axes.grid": True,
  "grid.color": _GRID,
  "text.color": _INK,
  "xtick.color": _INK,
  "ytick.color": _INK,
  "legend.frameon": False,
  "lines.linewidth": 2.5,
}


def save(path, records):
  """Draws a run, from the records of its journal."""
  ledger = time_ledger.of(records)
  with matplotlib.style.context(["default", _STYLE]):
    figure = matplotlib.figure.Figure(figsize=(15.0, 6.4), layout="constrained")
    timeline, fates = figure.subplots(1, 2, width_ratios=(3, 2))
    draw_timeline(timeline, records, ledger)
    draw_fates(fates, records, ledger)
    figure.savefig(path, dpi=100)


def draw_timeline(axes, records, ledger):
  """A row for each replica: where its time went, and when it was lost.

  A column shows the shares of the categories in its time, so that work that is
  shorter than a column is neither hidden nor larger than it was.
  """
  total = ledger.goodput()
  labels = {
    category: f"{category}, {total.share(category):.1%}"
    for category in COLORS
    if total.share(category) > 5e-4
  }
  for row, replica in enumerate(ledger.replicas):
    edges, heights = shares(ledger.spans(replica), ledger.end)
    low = np.full(_COLUMNS, row - 0.4)
    for category, color in COLORS.items():
      high = low + 0.8 * heights[category]
      if heights[category].any():
        axes.fill_between(
          np.repeat(edges, 2)[1:-1],
          np.repeat(low, 2),
          np.repeat(high, 2),
          color=color,
          linewidth=0,
          label=labels.pop(category, None),
        )
      low = high
  rows = {replica: row for row, replica in enumerate(ledger.replicas)}
  lost = [r for r in records if r["kind"] == "lost" and r["replica"] in rows]
  if lost:
    axes.plot(
      [r["time"] for r in lost],
      [rows[r["replica"]] for r in lost],
      "X",
      color=_LOST,
      markersize=11,
      label="lost",
    )
  for record in records:
    if record["kind"] == "coordinator":
      axes.axvline(record["time"], color="#4a5568", linewidth=1, linestyle=":")
  axes.set_title("What each replica did")
  axes.set_xlabel("seconds (dotted: the coordinator starts)")
  axes.set_xlim(0, ledger.end)
  _name_rows(axes, ledger)


def shares(spans, seconds, columns=_COLUMNS):
  """The edges of columns of equal time, and by category its share of each."""
  edges = np.linspace(0.0, seconds, columns + 1)
  width = seconds / columns
  heights = {category: np.zeros(columns) for category in COLORS}
  for _, begin, end, category in spans:
    first = min(int(begin / width), columns - 1)
    last = min(int(end / width), columns - 1)
    at = np.arange(first, last + 1)
    inside = np.minimum(edges[at + 1], end) - np.maximum(edges[at], begin)
    heights[category][at] += np.maximum(inside, 0.0) / width
  return edges, heights


def draw_fates(axes, records, ledger):
  """How many gradients of each replica were applied, or dropped and why."""
  rows = {replica: row for row, replica in enumerate(ledger.replicas)}
  counts = {"applied": np.zeros(len(rows), int)}
  for record in records:
    if record["kind"] == "commit":
      for member in record["members"]:
        counts["applied"][rows[member["replica"]]] += member["count"]
    elif record["kind"] == "drop":
      of_reason = counts.setdefault(record["reason"], np.zeros(len(rows), int))
      of_reason[rows[record["replica"]]] += record["count"]
  left = np.zeros(len(rows), int)
  for label, values in counts.items():
    color = _REASONS.get(label, _OTHER)
    axes.barh(range(len(rows)), values, left=left, label=label, color=color)
    left += values
  axes.set_title("What became of its gradients")
  axes.set_xlabel("gradients")
  _name_rows(axes, ledger)


def _name_rows(axes, ledger):
  names = [f"{replica}" for replica in ledger.replicas]
  axes.set_yticks(range(len(names)), names)
  axes.set_ylabel("replica")
  axes.grid(axis="y", visible=False)
  axes.invert_yaxis()
  axes.legend(
    loc="upper center",
    bbox_to_anchor=(0.5, -0.15),
    ncols=3,
    columnspacing=1.2,
    handlelength=1.3,
  )


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("journal", type=pathlib.Path)
  parser.add_argument("picture", type=pathlib.Path)
  args = parser.parse_args()
  # A resumed run has several parts.
  last = journal.segments(journal.read(args.journal).records)[-1]
  save(args.picture, last)


if __name__ == "__main__":
  main()
