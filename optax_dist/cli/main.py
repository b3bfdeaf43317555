"""Entry point of the ``optax-dist`` command."""

import errno
import io
import os
import sys
from collections.abc import Sequence

from optax_dist.cli import errors, parser
from optax_dist.cli.launch import command as launch
from optax_dist.cli.launch import coordinator, doctor
from optax_dist.cli.runs import report, watch
from optax_dist.cli.simulate import plan, simulate


def commands() -> parser.Parser:
  """The parser of the whole command line; ``shtab`` makes completions of it."""
  root = parser.Parser(
    prog="optax-dist",
    description="Distributed optimizers for JAX and Optax, at work.",
  )
  root.add_argument(
    "--version", action="store_true", help="print the version and exit"
  )
  added = root.add_subparsers(
    title="commands", metavar="COMMAND", dest="command"
  )
  for command in (launch, coordinator, doctor, watch, report, simulate, plan):
    command.add_parser(added)
  return root


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the ``optax-dist`` command.

  Args:
    argv: the arguments after the command's name; None for this process's own.

  Returns:
    The exit code: 0 for success, 1 for a failure, 2 for wrong usage, 130 for
    Ctrl-C.

  Example:
    >>> main(["--version"])  # doctest: +ELLIPSIS
    optax-dist ...
    0
  """
  argv = sys.argv[1:] if argv is None else list(argv)
  _prepare_streams()
  try:
    code = _dispatch(argv)
    sys.stdout.flush()
    return code
  except SystemExit as stop:  # Raised by argparse for --help and errors.
    return stop.code if isinstance(stop.code, int) else 2
  except errors.CommandError as error:
    parser.say(str(error))
    return error.exit_code
  except KeyboardInterrupt:
    parser.say("interrupted")
    return 130
  except BrokenPipeError:
    # The reader of the output has exited (`| head`). Otherwise Python would
    # report an error when it flushes standard output at exit.
    _discard_output()
    return 1
  except OSError as error:
    # If a file could not be written, the error has its name.
    if error.filename is not None or error.errno != errno.ENOSPC:
      raise
    _discard_output()
    parser.say(f"the output can't be written: {error.strerror}")
    return 1


def _prepare_streams() -> None:
  """Makes standard streams usable, even if closed or of a narrow encoding."""
  for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
    stream = getattr(sys, name)
    if stream is None:
      # Closed, as by `>&-`. In this order they get their own numbers back, which
      # a launched process would otherwise mistake for its launcher's channel.
      setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115
    elif mode == "w" and isinstance(stream, io.TextIOWrapper):
      # File names, and what replicas print, may contain any character.
      stream.reconfigure(errors="backslashreplace")


def _discard_output() -> None:
  os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _dispatch(argv: list[str]) -> int:
  root = commands()
  args, unknown = root.parse_known_args(argv)
  if unknown:
    args_of = root if args.command is None else args.parser
    args_of.error(f"unknown arguments: {' '.join(unknown)}")
  if args.version:
    import optax_dist

    print(f"optax-dist {optax_dist.__version__}")
    return 0
  if args.command is None:
    root.error("a command is needed")
  return args.execute(args)
