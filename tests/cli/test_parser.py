"""Argument types."""

import argparse
import math

import hypothesis
import pytest
from hypothesis import strategies as st

from optax_dist.cli import parser


@hypothesis.given(st.integers(), st.integers(-5, 5), st.integers(0, 9))
def test_whole_number_accepts_exactly_its_range(value, minimum, width):
  parse = parser.whole_number(minimum, minimum + width)
  if minimum <= value <= minimum + width:
    assert parse(str(value)) == value
  else:
    with pytest.raises(argparse.ArgumentTypeError, match="whole number from"):
      parse(str(value))


@pytest.mark.parametrize("text", ["", "1.5", "one", "0x1", "nan"])
def test_whole_number_refuses_what_is_no_whole_number(text):
  with pytest.raises(argparse.ArgumentTypeError, match="of at least 1"):
    parser.whole_number(1)(text)


@hypothesis.given(st.floats())
def test_positive_float_accepts_exactly_finite_numbers_above_0(value):
  if value > 0 and math.isfinite(value):
    assert parser.positive_float(repr(value)) == value
  else:
    with pytest.raises(argparse.ArgumentTypeError, match="above 0"):
      parser.positive_float(repr(value))


def test_positive_float_refuses_text():
  with pytest.raises(argparse.ArgumentTypeError, match="'fast'"):
    parser.positive_float("fast")


def test_a_command_is_run_with_its_arguments():
  commands = parser.Parser().add_subparsers()
  command = parser.add_command(commands, "go", len, description="Goes.")
  assert command.parse_args([]).execute is len
  assert "Goes." in command.format_help()


def test_a_number_tells_what_it_is_if_not_given():
  command = parser.Parser(prog="go")
  parser.add_number(
    command, "--rate", "R", parser.positive_float, default=60.0, help="of it"
  )
  assert command.parse_args([]).rate == 60.0
  assert command.parse_args(["--rate", "2.5"]).rate == 2.5
  assert "--rate R    of it (default: 60)" in command.format_help()
