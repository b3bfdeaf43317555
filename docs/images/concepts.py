"""Draws the pictures of docs/concepts.md: who waits for whom, what travels.

python docs/images/concepts.py
"""

import pathlib

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
from matplotlib.patches import FancyArrowPatch, Rectangle

COMPUTE, WAIT, MESSAGE, DROP, CENTER = (
  "#4C78A8",
  "#D9DEE5",
  "#F2A541",
  "#C44E52",
  "#59A14F",
)
_HERE = pathlib.Path(__file__).parent
_HEIGHT = 0.56  # Of a replica's row.


def _rows(ax, count, extra=()):
  for i in range(count):
    ax.text(-0.12, -i, f"replica {i}", ha="right", va="center", fontsize=12)
  for y, label in extra:
    ax.text(-0.12, y, label, ha="right", va="center", fontsize=12)
  ax.axis("off")


def _bar(ax, row, start, stop, color=COMPUTE, label="", **kwargs):
  style = {"facecolor": color, "edgecolor": "white", "linewidth": 1.2, **kwargs}
  ax.add_patch(
    Rectangle((start, -row - _HEIGHT / 2), stop - start, _HEIGHT, **style)
  )
  if label:
    ink = "black" if color in (WAIT, MESSAGE) else "white"
    ax.text(
      (start + stop) / 2,
      -row,
      label,
      ha="center",
      va="center",
      fontsize=11,
      color=ink,
    )


def _message(ax, start, stop, rows, text=""):
  """A collective: all replicas are in it together."""
  ax.add_patch(
    Rectangle(
      (start, -rows + 1 - _HEIGHT / 2 - 0.06),
      stop - start,
      rows - 1 + _HEIGHT + 0.12,
      facecolor=MESSAGE,
      edgecolor="none",
    )
  )
  if text:
    ax.text(
      (start + stop) / 2,
      (1 - rows) / 2,
      text,
      ha="center",
      va="center",
      rotation=90,
      fontsize=11,
    )


def _arrow(ax, start, stop, color=MESSAGE, style="-|>"):
  ax.add_patch(
    FancyArrowPatch(
      start,
      stop,
      arrowstyle=style,
      mutation_scale=13,
      linewidth=1.8,
      color=color,
      shrinkA=0,
      shrinkB=0,
      zorder=3,
    )
  )


def _time(ax, stop, y):
  _arrow(ax, (0, y), (stop, y), "black")
  ax.text(stop, y - 0.34, "time", ha="right", va="center", fontsize=11)


def _legend(ax, entries, y):
  """Boxes with their meaning, in a line at height ``y``."""
  x = 0.0
  for color, text, width in entries:
    ax.add_patch(Rectangle((x, y - 0.16), 0.26, 0.32, facecolor=color))
    ax.text(x + 0.36, y, text, va="center", fontsize=11)
    x += width


def _figure(height, right=9.6, top=0.6, bottom=-4.6):
  figure, ax = plt.subplots(figsize=(9.2, height), layout="constrained")
  ax.set_xlim(-1.25, right)
  ax.set_ylim(bottom, top)
  return figure, ax


def cross_shard():
  figure, ax = _figure(3.5)
  _rows(ax, 4)
  start = 0.0
  for lengths in ([2.2, 2.0, 2.4, 1.7], [1.9, 2.3, 2.5, 2.0]):
    stop = start + max(lengths)
    for i, length in enumerate(lengths):
      _bar(ax, i, start, start + length, label="gradient")
      if length < max(lengths):
        _bar(ax, i, start + length, stop, WAIT, "wait" if length < 2.1 else "")
    _message(ax, stop, stop + 0.62, 4, "mean of gradients")
    for i in range(4):
      _bar(ax, i, stop + 0.62, stop + 1.5, CENTER, "step")
    start = stop + 1.58
  _time(ax, start + 0.3, -3.75)
  _legend(
    ax,
    [
      (COMPUTE, "compute", 1.4),
      (WAIT, "wait for the slowest", 2.5),
      (MESSAGE, "all-reduce, each step", 2.7),
      (CENTER, "the same step on all", 2),
    ],
    -4.4,
  )
  return figure


def sync_replicas():
  figure, ax = _figure(4.1, top=1.0, bottom=-4.8)
  _rows(ax, 4)
  width, gap = 2.05, 0.5
  late = 2
  for iteration in range(3):
    start = iteration * (width + gap)
    stop = start + width
    ax.text(
      (start + stop) / 2,
      0.62,
      f"iteration {iteration + 1}",
      ha="center",
      fontsize=12,
    )
    for i in range(4):
      if i != late:
        _bar(ax, i, start, stop, label=f"gradient of step {iteration}")
    _message(ax, stop, stop + gap, 4)
    ax.text(
      stop + gap / 2,
      -0.5,
      f"takes step {iteration + 1}",
      ha="center",
      va="center",
      rotation=90,
      fontsize=11,
    )
    ax.text(
      stop + gap / 2,
      -3.56,
      f"{3 + (iteration == 2)} in",
      ha="center",
      va="center",
      fontsize=11,
    )
  whole = 2 * width + gap
  _bar(ax, late, 0, whole, DROP, zorder=2)
  ax.text(
    whole / 2,
    -late,
    "gradient of step 0: comes after step 1, is stale",
    ha="center",
    va="center",
    fontsize=11,
    color="white",
    zorder=3,
  )
  _bar(
    ax,
    late,
    whole + gap,
    whole + gap + width,
    label="gradient of step 2",
  )
  _time(ax, 3 * (width + gap) + 0.35, -3.92)
  _legend(
    ax,
    [
      (COMPUTE, "counts", 1.3),
      (DROP, "dropped whole", 1.9),
      (
        MESSAGE,
        "all-reduce of the gradients that are in, and of their count",
        4,
      ),
    ],
    -4.58,
  )
  return figure


def elastic_average():
  figure, ax = _figure(4.2, top=1.5)
  _rows(ax, 4, [(1.05, "center")])
  steps, width, gap, start = 4, 0.72, 1.15, 0.0
  ends = []
  for _ in range(2):
    for i in range(4):
      for step in range(steps):
        _bar(ax, i, start + step * width, start + (step + 1) * width)
    stop = start + steps * width
    # All at the same moment.
    x = stop + 0.7 * gap
    ax.plot([x, x], [-3, 0.5], color=MESSAGE, linewidth=1.8, zorder=2)
    _arrow(ax, (x, 0.3), (x, 0.78), style="<|-|>")
    for i in range(4):
      _arrow(ax, (stop + 0.03, -i), (x, -i), style="<|-|>")
    ends.append((stop, stop + gap))
    start = stop + gap
  _bar(ax, -1.05, 0, start, CENTER)
  for stop, last in ends:
    ax.text(
      (stop + last) / 2,
      1.05,
      "moves",
      ha="center",
      va="center",
      fontsize=11,
      color="white",
    )
  ax.text(
    2 * width,
    1.05,
    "stays",
    ha="center",
    va="center",
    fontsize=11,
    color="white",
  )
  ax.text(
    ends[1][0] - 2 * width,
    1.05,
    "stays",
    ha="center",
    va="center",
    fontsize=11,
    color="white",
  )
  _time(ax, start + 0.35, -3.75)
  _legend(
    ax,
    [
      (COMPUTE, "a step of the replica's own", 3.0),
      (
        MESSAGE,
        "once in a period: all are pulled together, none is made equal",
        5,
      ),
    ],
    -4.4,
  )
  return figure


def local_updates():
  figure, ax = _figure(3.5)
  _rows(ax, 4)
  steps, width, start = 4, 0.62, 0.0
  for _ in range(2):
    for i in range(4):
      for step in range(steps):
        _bar(ax, i, start + step * width, start + (step + 1) * width)
    stop = start + steps * width
    _message(ax, stop, stop + 0.62, 4, "mean of changes")
    for i in range(4):
      _bar(ax, i, stop + 0.62, stop + 1.62, CENTER, "outer\nstep")
    start = stop + 1.7
  _time(ax, start + 0.35, -3.75)
  _legend(
    ax,
    [
      (COMPUTE, "a step of the replica's own", 3.1),
      (MESSAGE, "all-reduce, once in a period", 3.15),
      (CENTER, "all start again from the same", 2),
    ],
    -4.4,
  )
  return figure


def coordinator():
  """A step takes three of four; nobody waits for the slow or the dead."""
  figure, ax = _figure(4.1, top=0.9, bottom=-4.75)
  _rows(ax, 4)
  steps = [1.75, 3.55, 5.4, 7.25]
  ends = [
    [1.35, 3.1, 5.4, 6.8],
    [1.55, 3.55, 5.0, 7.25],
    [1.75, 2.7],
    [4.3, 5.25, 6.9],
  ]
  # Which gradients count: replica 3 comes late with its first one.
  late = {(3, 0)}
  for row, own in enumerate(ends):
    start = 0.0
    for i, end in enumerate(own):
      color = DROP if (row, i) in late else COMPUTE
      label = "stale" if (row, i) in late else "gradient"
      _bar(ax, row, start, end, color, label if end - start > 0.9 else "")
      # A stale one is known to be at once: go on from the newest parameters.
      later = [s for s in steps if s >= end]
      start = end if (row, i) in late else min(later, default=end)
      if start > end:
        _bar(ax, row, end, start, WAIT)
  _bar(ax, 2, 3.55, 4.35, DROP)
  ax.plot(4.35, -2, "x", color="black", ms=13, mew=3, zorder=4)
  ax.text(4.6, -2, "killed", va="center", fontsize=12)
  for i, step in enumerate(steps):
    ax.plot([step, step], [0.42, -3.42], color=MESSAGE, lw=4, zorder=3)
    ax.text(step, 0.6, f"step {i + 1}", ha="center", fontsize=12)
  _time(ax, 8.0, -3.92)
  _legend(
    ax,
    [
      (COMPUTE, "counts", 1.3),
      (DROP, "dropped, lost", 1.95),
      (WAIT, "waits", 1.2),
      (MESSAGE, "the three members average among themselves", 3),
    ],
    -4.55,
  )
  return figure


if __name__ == "__main__":
  for draw in (
    cross_shard,
    sync_replicas,
    elastic_average,
    local_updates,
    coordinator,
  ):
    draw().savefig(_HERE / f"concept_{draw.__name__}.png", dpi=150)
