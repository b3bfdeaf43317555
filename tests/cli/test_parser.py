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
