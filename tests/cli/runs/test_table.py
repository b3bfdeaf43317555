"""A run as a table."""

import time

import pytest
import run_journals

from optax_dist.cli.runs import table as run_table
from optax_dist.coordinator import journal


@pytest.fixture(autouse=True)
def stopped_clock(monkeypatch):
  """Stops the clock that the table reads."""
  monkeypatch.setattr(time, "monotonic", lambda: 1000.0)


def _table(numbers, width=140):
  return run_table.table(numbers, width)


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_narrow_terminal_gets_fewer_whole_columns(width, tmp_path):
  path = run_journals.ended(tmp_path / "run.jsonl")
  numbers = run_journals.numbers_of(*journal.read(path).records)
  printed = _table(numbers, width)
  assert max(map(len, printed.splitlines()[1:])) <= width
  assert "accepted" in printed
  assert ("dropped as" in printed) == (width == 140)


def test_title_shows_restarts_and_abandoned_rounds():
  title = lambda numbers: _table(numbers).splitlines()[0]
  numbers = run_journals.numbers_of(
    {"kind": "coordinator", "time": 0.0, "epoch": 0},
    {"kind": "coordinator", "time": 0.0, "epoch": 1},
    {"kind": "abandon", "time": 0.0},
  )
  assert title(numbers) == (
    "step 0, 0.0 steps/s, coordinator restarts: 1, 1 aggregation rounds abandoned"
  )


def test_missing_replica_is_named_below_the_table():
  numbers = run_journals.numbers_of(
    {"kind": "join", "time": 0.0, "replica": 0},
    {
      "kind": "stall",
      "time": 9.0,
      "waited": 9.0,
      "missing": {"computing": ["[b]"]},
    },
  )
  last = _table(numbers).splitlines()[-1]
  assert last == "Waiting for replica [b], for 9.0 s."
