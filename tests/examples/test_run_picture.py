"""The picture of a run: its time and counts where they belong."""

import importlib.util
import pathlib
import sys

import matplotlib.colors
import matplotlib.figure
import matplotlib.image
import numpy as np
import pytest
import run_journals

from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics import time_ledger

_PATH = pathlib.Path(__file__).resolve().parents[2] / "examples/run_picture.py"
_SPEC = importlib.util.spec_from_file_location("run_picture", _PATH)
picture = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(picture)


@pytest.fixture
def records(tmp_path):
  return journal.read(run_journals.ended(tmp_path / "run.jsonl")).records


def _axes():
  return matplotlib.figure.Figure().subplots()


def _rows(axes):
  return [label.get_text() for label in axes.get_yticklabels()]


def _pixels(path, row, rows):
  """The categories in each pixel column of a replica's row, by color."""
  image = matplotlib.image.imread(path)[:, :, :3]
  part = image[row * len(image) // rows : (row + 1) * len(image) // rows]
  return {
    name: (np.abs(part - matplotlib.colors.to_rgb(color)) < 0.02)
    .all(axis=2)
    .any(axis=0)
    for name, color in picture.COLORS.items()
  }


def _timeline(records, path, replicas=3):
  """Draws the timeline alone, without axes or legend."""
  figure = matplotlib.figure.Figure(figsize=(4, 1 * replicas), dpi=100)
  axes = figure.add_axes((0, 0, 1, 1))
  ledger = time_ledger.of(records)
  picture.draw_timeline(axes, records, ledger)
  axes.set_axis_off()
  axes.get_legend().remove()
  axes.set_ylim(replicas - 0.5, -0.5)
  figure.savefig(path)
  return ledger


def test_picture_has_a_row_for_each_replica(records, tmp_path):
  path = tmp_path / "x.png"
  ledger = _timeline(records, path)
  at = lambda seconds: int(400 * seconds / ledger.end)
  first, late = _pixels(path, 0, 3), _pixels(path, 2, 3)
  # Each gradient took 0.5 s, and came 0.2 s before its step.
  assert first["useful"][at(1.5)]
  assert not first["dropped"].any()
  assert first["waiting"].any() or first["exchanging"].any()
  assert late["dropped"][at(1.7)]
  assert not late["useful"].any()
  axes = _axes()
  picture.draw_timeline(axes, records, ledger)
  assert _rows(axes) == ["0", "1", "2"]
  lost, leader = axes.lines
  assert lost.get_xydata().tolist() == [[5.0, 1.0]]
  assert list(leader.get_xdata()) == [0.0, 0.0]


def test_picture_of_a_long_run_has_no_spurious_gaps(tmp_path):
  """Thousands of gradients in a pixel: each column has both their categories."""
  path = tmp_path / "run.jsonl"
  with journal.Journal(path) as written:
    run_journals.begin(written, range(1))
    for step in range(6000):
      run_journals.commit(written, step, 0, at=1.0 + step)
  records = journal.read(path).records
  _timeline(records, tmp_path / "x.png", 1)
  result = _pixels(tmp_path / "x.png", 0, 1)
  assert result["useful"][1:-1].all()
  assert result["exchanging"][1:-1].all()


def test_a_run_has_one_picture_of_any_format(tmp_path, monkeypatch):
  path = run_journals.ended(tmp_path / "[a] $run$.jsonl")
  for name, start in (("x.png", b"\x89PNG"), ("x.svg", b"<?xml")):
    argv = ["run_picture.py", str(path), str(tmp_path / name)]
    monkeypatch.setattr(sys, "argv", argv)
    picture.main()
    assert (tmp_path / name).read_bytes().startswith(start)


def _bars(axes):
  """Row, start and length of each bar, by label."""
  return {
    bars.get_label(): [
      (
        round(bar.get_y() + bar.get_height() / 2),
        pytest.approx(bar.get_x()),
        pytest.approx(bar.get_width()),
      )
      for bar in bars
    ]
    for bars in axes.containers
  }


def test_outcomes_of_gradients_are_stacked(records):
  run = [
    *records,
    {"kind": "drop", "replica": 2, "reason": "new", "count": 3, "time": 5.0},
    {"kind": "drop", "replica": 0, "reason": "stale", "count": 2, "time": 5.0},
  ]
  axes = _axes()
  picture.draw_fates(axes, run, time_ledger.of(run))
  assert _bars(axes) == {
    "applied": [(0, 0, 4), (1, 0, 4), (2, 0, 0)],
    "stale": [(0, 4, 2), (1, 4, 0), (2, 0, 4)],
    "new": [(0, 6, 0), (1, 4, 0), (2, 4, 3)],
  }


def test_lost_gradients_are_not_green():
  colors = picture._REASONS
  assert len(set(colors.values())) == len(colors)
  red, green, blue = (int(colors["lost"][i : i + 2], 16) for i in (1, 3, 5))
  assert green < max(red, blue) / 2
