"""A run as a table."""

import io
import re

import pytest
import rich.console
import run_journals

from optax_dist.cli.runs import table as run_table
from optax_dist.coordinator import journal


@pytest.mark.parametrize("width", [40, 60, 80, 140])
def test_a_narrow_terminal_gets_fewer_columns_and_cuts_none(width, tmp_path):
  path = run_journals.ended(tmp_path / "run.jsonl")
  numbers = run_journals.numbers_of(*journal.read(path).records)
  console = rich.console.Console(
    file=io.StringIO(), width=width, force_terminal=True, color_system=None
  )
  console.print(run_table.table(numbers, width=width))
  printed = console.file.getvalue()
  assert "\N{HORIZONTAL ELLIPSIS}" not in printed
  assert "accepted" in printed
  assert ("dropped as" in printed) == (width == 140)


def test_replicas_are_in_the_order_of_their_numbers():
  shown = run_table.table(
    run_journals.numbers_of(
      *(
        {"kind": "join", "time": 0.0, "replica": replica}
        for replica in ("b", 10, 2, "a", 1)
      )
    )
  )
  assert list(shown.columns[0].cells) == ["1", "2", "10", "a", "b"]


def test_the_title_has_what_is_known():
  assert (
    run_table.table(run_journals.numbers_of()).title == "step 0, 0.0 steps/s"
  )
  numbers = run_journals.numbers_of(
    {"kind": "leader", "time": 0.0, "replica": 3},
    {"kind": "leader", "time": 0.0, "replica": 4},
    {"kind": "abandon", "time": 0.0},
  )
  assert run_table.table(numbers).title == (
    "step 0, 0.0 steps/s, leader 4 (term 2), 1 attempts abandoned"
  )


def test_what_a_replica_takes_is_in_milliseconds():
  member = run_journals.member(0, 0, age=0.25, compute=0.0625)
  numbers = run_journals.numbers_of(
    {"kind": "join", "time": 0.0, "replica": 0},
    {"kind": "join", "time": 0.0, "replica": 1},
    {"kind": "commit", "time": 1.0, "step": 0, "members": [member]},
  )
  shown = run_table.table(numbers)
  rows = {column.header: list(column.cells) for column in shown.columns}
  assert rows["compute"] == ["62 ms", ""]
  assert rows["wait"] == ["250 ms", "0 ms"]
  assert rows["last seen"] == ["0.2 s ago", "1.0 s ago"]


def test_process_and_its_end_are_shown():
  ended = {"kind": "process", "time": 2.0, "replica": 1, "host": "h", "pid": 7}
  shown = run_table.table(
    run_journals.numbers_of(
      {"kind": "join", "time": 0.0, "replica": 0},
      ended | {"ended": "was ended by SIGKILL"},
    )
  )
  rows = {column.header: list(column.cells) for column in shown.columns}
  assert rows["process"] == ["", "h: 7"]
  assert rows["ended"] == ["", "was ended by SIGKILL"]


def test_no_color_is_respected(monkeypatch):
  monkeypatch.setenv("NO_COLOR", "1")
  console = rich.console.Console(file=io.StringIO(), force_terminal=True)
  numbers = run_journals.numbers_of(
    {"kind": "join", "time": 0.0, "replica": 0},
    {
      "kind": "stall",
      "time": 9.0,
      "waited": 9.0,
      "missing": {"computing": [0]},
    },
  )
  console.print(run_table.table(numbers))
  printed = console.file.getvalue()
  assert "waiting for" in printed
  assert not re.search(r"\x1b\[[\d;]*3\d", printed)


def test_what_is_waited_for_is_below_the_table():
  numbers = run_journals.numbers_of(
    {"kind": "join", "time": 0.0, "replica": 0},
    {
      "kind": "stall",
      "time": 9.0,
      "waited": 9.0,
      "missing": {"computing": ["[b]"]},
    },
  )
  console = rich.console.Console(file=io.StringIO(), width=140)
  console.print(run_table.table(numbers))
  # A name with brackets is no markup.
  assert "waiting for replica [b], for 9.0 s" in console.file.getvalue()
