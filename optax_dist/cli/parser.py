"""An argument parser with one-line errors, and common argument types."""

import argparse
import math
import sys
from collections.abc import Callable
from typing import Any, NoReturn


class Parser(argparse.ArgumentParser):
  """An ``argparse.ArgumentParser`` that reports an error in one line."""

  def __init__(self, **kwargs):
    kwargs.setdefault("formatter_class", HelpFormatter)
    # An abbreviation would break when a strategy adds a flag.
    super().__init__(**kwargs, allow_abbrev=False)

  def error(self, message: str) -> NoReturn:
    self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
  """Keeps the layout of descriptions, and leaves room for long flags."""

  def __init__(self, prog, **kwargs):
    super().__init__(prog, **({"max_help_position": 30} | kwargs))


def add_command(
  commands: Any,
  name: str,
  run: Callable[[argparse.Namespace], int],
  **texts: str,
) -> Parser:
  """Adds a command.

  Args:
    commands: what ``add_subparsers`` returned.
    name: name of the command.
    run: function that runs it, given its parsed arguments.
    **texts: its ``help``, ``description``, ``usage`` and ``epilog``, in lines of at
      most 80 characters.

  Returns:
    Its parser.
  """
  command = commands.add_parser(name, **texts)
  command.set_defaults(execute=run, parser=command)
  return command


def add_number(
  to: argparse._ActionsContainer,
  flag: str,
  metavar: str,
  kind: Callable[[str], float],
  default: float,
  help: str,
) -> None:
  """Adds a numeric flag, with its default in the help text.

  Args:
    to: a parser, or a group of its arguments.
    flag: the flag, with both hyphens.
    metavar: name of the number in the help text.
    kind: an argument type, such as :func:`positive_float`.
    default: the default value.
    help: the help text.
  """
  to.add_argument(
    flag,
    metavar=metavar,
    type=kind,
    default=default,
    help=f"{help} (default: %(default)g)",
  )


def whole_number(
  minimum: int, maximum: int | None = None
) -> Callable[[str], int]:
  """An argument type: a whole number in a range, bounds included."""
  bounds = f"of at least {minimum}"
  if maximum is not None:
    bounds = f"from {minimum} to {maximum}"

  def parse(text: str) -> int:
    try:
      value = int(text)
    except ValueError:
      value = minimum - 1
    if value < minimum or (maximum is not None and value > maximum):
      raise argparse.ArgumentTypeError(
        f"must be a whole number {bounds}, got {text!r}"
      )
    return value

  return parse


def positive_float(text: str) -> float:
  """An argument type: a finite number above 0."""
  return _number(text, "above 0", lambda value: 0 < value < math.inf)


def non_negative_float(text: str) -> float:
  """An argument type: a finite number of at least 0."""
  return _number(text, "of at least 0", lambda value: 0 <= value < math.inf)


def _number(text: str, bounds: str, fits: Callable[[float], bool]) -> float:
  try:
    value = float(text)
  except ValueError:
    value = math.nan
  if not fits(value):
    raise argparse.ArgumentTypeError(
      f"must be a finite number {bounds}, got {text!r}"
    )
  return value


def say(message: str) -> None:
  """Prints a message to standard error, prefixed by the command's name."""
  lines = map(plain, message.split("\n"))
  print("optax-dist:", "\n".join(lines), file=sys.stderr)


def plain(text: str) -> str:
  r"""A line for a terminal: what can't be printed stands there as its escape.

  Whoever wrote a journal could otherwise move the cursor, hide lines, or type
  into the terminal of its reader.

  Example:
    >>> print(plain("a\x1b[2Jb\u202e\n"))
    a\x1b[2Jb\u202e\n
  """
  if text.isprintable():
    return text
  return "".join(
    c if c.isprintable() else c.encode("unicode_escape").decode() for c in text
  )
