"""Errors of the command in one line, and their exit codes."""

import pytest

from optax_dist.cli import errors


@pytest.mark.parametrize(
  ("message", "line"),
  [
    ("as it is", "as it is"),
    ("two\nlines", "two lines"),
    ("  a\tmessage \r\n\n  of a library\n", "a message of a library"),
    ("a\u2028separator\x0bof lines", "a separator of lines"),
    ("", ""),
  ],
)
def test_any_message_is_one_line(message, line):
  assert str(errors.CommandError(message)) == line
  assert len(line.splitlines()) <= 1


def test_wrong_usage_is_what_it_is_unless_told_otherwise():
  assert errors.CommandError("x").exit_code == 2
  assert errors.CommandError("x", exit_code=1).exit_code == 1
