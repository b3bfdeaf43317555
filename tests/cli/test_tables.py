"""Tables as text."""

import io
import os

import pytest

from optax_dist.cli import tables


def test_a_table_without_rows_has_its_title_and_names():
  assert tables.text("none", ["a", "b"], []) == "none\na  b\n----"


def test_columns_are_as_wide_as_their_widest_cell():
  rows = [{"name": "replica", "n": "1"}, {"name": "", "n": "12.5"}]
  shown = tables.text("two", ["n", "name"], rows, words=["name"])
  assert shown.splitlines() == [
    "two",
    "   n  name",
    "-------------",
    "   1  replica",
    "12.5",
  ]


def test_what_is_no_terminal_is_wide():
  assert tables.width(io.StringIO()) == 140
  with open(os.devnull) as file:
    assert tables.width(file) == 140


@pytest.mark.parametrize(("columns", "width"), [(60, 60), (0, 140)])
def test_a_terminal_says_how_wide_it_is(columns, width, monkeypatch):
  size = os.terminal_size((columns, 24))
  monkeypatch.setattr(os, "get_terminal_size", lambda number: size)
  with open(os.devnull) as file:
    assert tables.width(file) == width
