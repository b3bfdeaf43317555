"""Pictures of a journal: a timeline for each replica, drops, and waits."""

from __future__ import annotations

import collections
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.axes

from optax_dist.cli import panels
from optax_dist.quorum.events import ordered

_COMPUTE, _WAIT, _DROP, _LOST = "#3f7d4f", "#e0b23c", "#c2571a", "#8a3ffc"

# A color for each reason, equal in all pictures; losses are never green.
_REASONS = {
  "applied": _COMPUTE,
  "stale": _DROP,
  "lost": _LOST,
  "abandoned": "#7a5c45",
  "nonfinite": "#b3123c",
  "invalid": "#1f5fa8",
}
_OTHER = "#8a94a6"

Record = dict[str, Any]


def save(
  path: pathlib.Path, records: Sequence[Record], title: str = "A run"
) -> None:
  """Draws a timeline for each replica, its drops and its waits, as PNG.

  Args:
    path: the output file.
    records: the records of a journal.
    title: describes the run.

  Raises:
    errors.CommandError: the file can't be written.
  """
  panels.save(
    path,
    title,
    [
      lambda axes: draw_timeline(axes, records),
      lambda axes: draw_fates(axes, records),
      lambda axes: draw_waits(axes, records),
    ],
    inverted=2,
  )


def draw_timeline(
  axes: matplotlib.axes.Axes, records: Sequence[Record]
) -> None:
  """A row for each replica: computing, waiting, dropped work, and losses."""
  rows = _rows(records)
  bars: dict[str, list[tuple[int, float, float]]] = collections.defaultdict(
    list
  )
  for record in records:
    if record["kind"] == "commit":
      for member in record["members"]:
        row = rows[member["replica"]]
        _add_work(bars[_COMPUTE], row, member)
        if member["arrived"] is not None:
          wait = max(0.0, record["time"] - member["arrived"])
          bars[_WAIT].append((row, member["arrived"], wait))
    elif record["kind"] == "drop":
      _add_work(bars[_DROP], rows[record["replica"]], record)
  labels = {_COMPUTE: "computing", _WAIT: "waiting", _DROP: "dropped"}
  for color, label in labels.items():
    found = bars[color]
    axes.barh(
      [row for row, _, _ in found],
      [length for _, _, length in found],
      left=[start for _, start, _ in found],
      color=color,
      height=0.6,
      linewidth=0,
      label=label,
    )
  lost = [r for r in records if r["kind"] == "lost"]
  axes.plot(
    [r["time"] for r in lost],
    [rows[r["replica"]] for r in lost],
    "X",
    color=_LOST,
    markersize=11,
    label="lost",
  )
  for record in records:
    if record["kind"] == "leader":
      axes.axvline(record["time"], color="#4a5568", linewidth=1, linestyle=":")
  axes.set_yticks(list(rows.values()), [f"{name}" for name in rows])
  axes.set_title("What each replica did")
  axes.set_xlabel("seconds (dotted: a leader takes the role)")
  axes.set_ylabel("replica")
  axes.grid(axis="y", visible=False)
  axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=4)


def draw_fates(axes: matplotlib.axes.Axes, records: Sequence[Record]) -> None:
  """How many gradients of each replica were applied, or dropped and why."""
  rows = _rows(records)
  counts: dict[str, list[int]] = {"applied": [0] * len(rows)}
  for record in records:
    if record["kind"] == "commit":
      for member in record["members"]:
        counts["applied"][rows[member["replica"]]] += member["count"]
    elif record["kind"] == "drop":
      of_reason = counts.setdefault(record["reason"], [0] * len(rows))
      of_reason[rows[record["replica"]]] += record["count"]
  left = [0] * len(rows)
  for label, values in counts.items():
    color = _REASONS.get(label, _OTHER)
    axes.barh(range(len(rows)), values, left=left, label=label, color=color)
    left = [a + b for a, b in zip(left, values, strict=True)]
  axes.set_yticks(range(len(rows)), [f"{name}" for name in rows])
  axes.set_title("What became of its gradients")
  axes.set_xlabel("gradients")
  axes.set_ylabel("replica")
  axes.grid(axis="y", visible=False)
  axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3)


def draw_waits(axes: matplotlib.axes.Axes, records: Sequence[Record]) -> None:
  """The waits of each replica for commits, sorted."""
  waits: dict[Any, list[float]] = {name: [] for name in _rows(records)}
  for record in records:
    if record["kind"] == "commit":
      for member in record["members"]:
        if member["arrived"] is not None:
          waits[member["replica"]].append(
            1000 * max(0.0, record["time"] - member["arrived"])
          )
  for name, found in waits.items():
    if found:
      share = [100 * (i + 0.5) / len(found) for i in range(len(found))]
      axes.plot(share, sorted(found), label=f"replica {name}")
  axes.set_title("Waits for a commit")
  axes.set_xlabel("gradients that waited less (%)")
  axes.set_ylabel("ms")
  axes.set_yscale("symlog", linthresh=1.0)
  axes.set_ylim(bottom=0)
  if any(waits.values()):
    axes.legend(loc="upper left", fontsize=12)


def _rows(records: Sequence[Record]) -> dict[Any, int]:
  names = {r["replica"] for r in records if r["kind"] in ("join", "drop")}
  for record in records:
    if record["kind"] == "commit":
      names |= {member["replica"] for member in record["members"]}
  names |= {r["replica"] for r in records if r["kind"] == "lost"}
  return {name: row for row, name in enumerate(ordered(names))}


def _add_work(
  bars: list[tuple[int, float, float]], row: int, record: Record
) -> None:
  if record["arrived"] is not None and record["compute"] is not None:
    start = record["arrived"] - record["compute"]
    bars.append((row, start, record["compute"]))
