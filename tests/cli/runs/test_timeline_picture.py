"""The picture of a journal: bars, counts and waits where they belong."""

import matplotlib.figure
import numpy as np
import pytest
import run_journals

from optax_dist.cli import errors
from optax_dist.cli.runs import timeline_picture
from optax_dist.coordinator import journal


@pytest.fixture
def records(tmp_path):
  return journal.read(run_journals.ended(tmp_path / "run.jsonl")).records


def _axes():
  return matplotlib.figure.Figure().subplots()


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


def _rows(axes):
  return [label.get_text() for label in axes.get_yticklabels()]


def test_each_replica_has_a_row_of_what_it_did(records):
  axes = _axes()
  timeline_picture.draw_timeline(axes, records)
  bars = _bars(axes)
  assert _rows(axes) == ["0", "1", "2"]
  steps = [1.0, 2.0, 3.0, 4.0]
  # Each gradient took 0.5 s, came 0.2 s before its step, and waited for it.
  assert bars["computing"] == [
    (row, at - 0.7, 0.5) for at in steps for row in (0, 1)
  ]
  assert bars["waiting"] == [
    (row, at - 0.2, 0.2) for at in steps for row in (0, 1)
  ]
  assert bars["dropped"] == [(2, at + 0.1 - 0.9, 0.9) for at in steps]
  (lost, leader) = axes.lines
  assert lost.get_xydata().tolist() == [[5.0, 1.0]]
  assert list(leader.get_xdata()) == [0.0, 0.0]


def test_a_gradient_of_unknown_times_has_no_bar(records):
  for record in records:
    if record["kind"] == "commit":
      record["members"][0]["compute"] = None
      record["members"][1]["arrived"] = None
  axes = _axes()
  timeline_picture.draw_timeline(axes, records)
  bars = _bars(axes)
  assert bars["computing"] == []
  assert [row for row, _, _ in bars["waiting"]] == [0] * 4
  waits = _axes()
  timeline_picture.draw_waits(waits, records)
  assert [line.get_label() for line in waits.lines] == ["replica 0"]


def test_what_became_of_gradients_is_stacked(records):
  run = [
    *records,
    {"kind": "drop", "replica": 2, "reason": "new", "count": 3, "time": 5.0},
    {"kind": "drop", "replica": 0, "reason": "stale", "count": 2, "time": 5.0},
  ]
  axes = _axes()
  timeline_picture.draw_fates(axes, run)
  assert _bars(axes) == {
    "applied": [(0, 0, 4), (1, 0, 4), (2, 0, 0)],
    "stale": [(0, 4, 2), (1, 4, 0), (2, 0, 4)],
    "new": [(0, 6, 0), (1, 4, 0), (2, 4, 3)],
  }


def test_waits_are_sorted_and_not_negative(records):
  for step, record in enumerate(r for r in records if r["kind"] == "commit"):
    for member, wait in enumerate((0.4 - step / 10, -1.0)):
      record["members"][member]["arrived"] = record["time"] - wait
  axes = _axes()
  timeline_picture.draw_waits(axes, records)
  first, second = axes.lines
  np.testing.assert_allclose(first.get_ydata(), [100, 200, 300, 400])
  np.testing.assert_allclose(first.get_xdata(), [12.5, 37.5, 62.5, 87.5])
  np.testing.assert_array_equal(second.get_ydata(), [0, 0, 0, 0])


def test_rows_are_in_the_order_of_their_numbers():
  axes = _axes()
  timeline_picture.draw_timeline(
    axes,
    [
      {"kind": "join", "replica": replica, "time": 0.0}
      for replica in (10, "b", 2, 1, "a")
    ],
  )
  assert _rows(axes) == ["1", "2", "10", "a", "b"]


def test_one_that_only_was_lost_has_a_row(records):
  axes = _axes()
  lost = {"kind": "lost", "replica": 7, "time": 0.0}
  timeline_picture.draw_timeline(axes, [*records, lost])
  assert _rows(axes) == ["0", "1", "2", "7"]


def test_lost_gradients_are_not_green():
  colors = timeline_picture._REASONS
  assert len(set(colors.values())) == len(colors)
  red, green, blue = (int(colors["lost"][i : i + 2], 16) for i in (1, 3, 5))
  assert green < max(red, blue) / 2


def test_a_file_that_cannot_be_written_is_an_error(tmp_path):
  with pytest.raises(errors.CommandError, match="can't write"):
    timeline_picture.save(tmp_path / "no" / "x.png", [])
