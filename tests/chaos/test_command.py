"""The command of the fault matrix; test_faults.py in tests/coordinator/runs runs it."""

import argparse

import pytest

from tests.chaos import __main__ as command


def test_seeds_are_numbers_and_ranges():
  assert command.seeds("3,8,20:23") == [3, 8, 20, 21, 22]


@pytest.mark.parametrize("seeds", ["5:", "9:3", "a:b", "-1:4", "1,", ""])
def test_wrong_seeds_are_refused(seeds):
  with pytest.raises(argparse.ArgumentTypeError, match="FIRST:END"):
    command.seeds(seeds)
