"""Shared code of programs that measure another library in separate processes.

Such a program starts itself again for each of these processes, in the library's
environment, with a role.
"""

import argparse
import os
import sys
from collections.abc import Callable
from typing import Any

import processes


def parser(description: str, timeout: float) -> argparse.ArgumentParser:
  """Returns a parser of the arguments that all of them have.

  Args:
    description: of the program, in the first of its lines.
    timeout: seconds until a measurement is given up.
  """
  made = argparse.ArgumentParser(description=description.splitlines()[0])
  made.add_argument("--python", default=sys.executable)
  made.add_argument("--params", type=int, default=1_000)
  made.add_argument("--seconds", type=float, default=5.0)
  made.add_argument("--timeout", type=float, default=timeout)
  made.add_argument("--role", help=argparse.SUPPRESS)
  return made


def command(args: argparse.Namespace, role: str, **more: Any) -> list[str]:
  """Returns the command that starts this program in a role.

  Args:
    args: those of this process.
    role: of the other one.
    **more: arguments of the program's own.
  """
  arguments = {
    "role": role,
    "params": args.params,
    "seconds": args.seconds,
    **more,
  }
  flags = [(f"--{name}", str(value)) for name, value in arguments.items()]
  return [args.python, os.path.abspath(sys.argv[0]), *sum(flags, ())]


def run(
  args: argparse.Namespace,
  measure: Callable[[argparse.Namespace], dict[str, Any]],
  play: Callable[[argparse.Namespace], None],
) -> None:
  """Measures and prints the figures; or, with a role, plays it."""
  if args.role is None:
    processes.launch()
    processes.say(**measure(args))
  else:
    processes.end_with_parent()
    play(args)
