"""``optax-dist replay``: replays a recorded run step by step."""

from __future__ import annotations

import argparse
import importlib.util
import pathlib
from collections.abc import Callable
from typing import Any

from optax_dist.cli import errors, installed, parser
from optax_dist.cli.runs import journal_file
from optax_dist.cli.train.processes import plan as process_plan

_DESCRIPTION = """\
Repeats on this machine what the replicas of a recorded run did, from its journal
and the data, and compares the parameters' fingerprint at every step that has one.
Prints the first step that differs, or "identical, N steps"; the exit code is 1 if
they differ. Fingerprints are in the journal of a run with fingerprint_every=1."""

_EPILOG = """\
The journal of "optax-dist train --launch processes" has all that replay needs. For
other runs the file of --setup is your program, which knows model and data. It has a
function replay(config), which gets the configuration in the journal
(a dictionary) and returns a dictionary with
  optimizer, params     as they were given to coordinator.join
  gradient(params, batch)
                        the gradient of a batch: of the samples that
                        Replica.batches gave, or of the batch given to Replica.step"""

_DIFFERS = 1


def add_parser(commands) -> None:
  """Adds the ``replay`` command to the commands of a parser."""
  command = parser.add_command(
    commands,
    "replay",
    run,
    help="replay a recorded run, and compare every step",
    description=_DESCRIPTION,
    epilog=_EPILOG,
  )
  journal_file.add_argument(command)
  command.add_argument(
    "--setup",
    metavar="FILE.py",
    type=pathlib.Path,
    help="a program that makes the model and the gradients, see below (default:"
    " what optax-dist train makes, for a journal of its own)",
  )


def run(args: argparse.Namespace) -> int:
  """Runs the ``replay`` command with its parsed arguments."""
  installed.check()
  records = journal_file.read(args.journal)
  runs = [record for record in records if record["kind"] == "run"]
  config = (runs[0].get("config") if runs else None) or {}
  setup = _setup_of(config) if args.setup is None else _load(args.setup)
  from optax_dist.cli import bar
  from optax_dist.simulate.replay.run import replay_run

  parts = setup(config)
  if not isinstance(parts, dict) or {"optimizer", "params", "gradient"} - set(
    parts
  ):
    raise errors.CommandError(
      f"--setup {args.setup}: replay(config) must return a dictionary with"
      f" optimizer, params and gradient, got {str(parts)[:60]}"
    )
  commits = sum(record["kind"] == "commit" for record in records)
  try:
    with bar.bar(f"replaying {args.journal.name}", commits) as shown:
      outcome = replay_run(
        records, progress=lambda done, total: shown(done), **parts
      )
  except ValueError as error:
    raise errors.CommandError(f"{args.journal}: {error}") from error
  print(outcome)
  return _DIFFERS if outcome.difference is not None else 0


def _setup_of(config: dict[str, Any]) -> Callable[[dict[str, Any]], Any]:
  """The setup of a run that this command has launched."""
  if config.get("program") != process_plan.PROGRAM:
    raise errors.CommandError(
      "the journal is not of 'optax-dist train --launch processes': give"
      " --setup FILE.py, which says what was trained"
    )
  installed.check("flax", "sklearn")
  return process_plan.replay


def _load(path: pathlib.Path) -> Callable[[dict[str, Any]], Any]:
  """The function `replay` in a Python file."""
  if not path.is_file():
    raise errors.CommandError(f"--setup {path}: there is no such file")
  spec = importlib.util.spec_from_file_location("optax_dist_replay", path)
  if spec is None or spec.loader is None:
    raise errors.CommandError(f"--setup {path}: it is not a Python file (.py)")
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  function = getattr(module, "replay", None)
  if not callable(function):
    raise errors.CommandError(
      f"--setup {path}: it has no function replay(config)"
    )
  return function
