"""The program to launch, after the options of ``optax-dist launch``."""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence

from optax_dist.cli import errors


def split(
  launch: argparse.ArgumentParser, argv: Sequence[str]
) -> tuple[list[str], list[str]]:
  """Separates the options of ``launch`` from the program and its arguments.

  Args:
    launch: the parser of the options.
    argv: the arguments of ``optax-dist``.

  Returns:
    Both parts; the second is empty if there is no program.
  """
  own = list(argv)
  if own[:1] != ["launch"]:
    return own, []
  with_value = {
    flag
    for action in launch._actions
    if action.nargs is None
    for flag in action.option_strings
  }
  at = 1
  while at < len(own):
    word = own[at]
    if word in ("--", "-m") or not word.startswith("-"):
      return own[:at], own[at:]
    at += 2 if word in with_value else 1
  return own, []


def command(program: Sequence[str]) -> list[str]:
  """The command line of a replica.

  Args:
    program: a script, ``-m`` and a module, or ``--`` and a program; with
      arguments.

  Raises:
    errors.CommandError: it is missing, or the script or program does not exist.

  Example:
    >>> command(["--", "sh", "train.sh"])
    ['sh', 'train.sh']
    >>> command(["-m", "package.train", "--steps", "9"])[1:]
    ['-m', 'package.train', '--steps', '9']
  """
  first = program[0] if program else ""
  if first == "--" and len(program) > 1:
    if shutil.which(program[1]) is None:
      raise errors.CommandError(
        f"launch: there is no program {program[1]} that can be run"
      )
    return list(program[1:])
  if first in ("", "--") or list(program) == ["-m"]:
    raise errors.CommandError(
      "launch: what shall be launched? Give a script, -m and a module, or --"
      " and a program, after the options"
    )
  if first != "-m" and not os.path.exists(first):
    raise errors.CommandError(
      f"launch: there is no script {first}; programs other than Python's"
      " come after --"
    )
  return [sys.executable, *program]
