"""``optax-dist launch``: starts and supervises a script's replicas."""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shutil
import socket
import sys
from typing import TYPE_CHECKING, Any

from optax_dist.cli import errors, parser
from optax_dist.cli.launch import options

if TYPE_CHECKING:  # Slow to import: see optax_dist.cli.
  from optax_dist.coordinator._internal import locks

_USAGE = """\
optax-dist launch [options] SCRIPT.py [its arguments]
       optax-dist launch [options] -m MODULE [its arguments]
       optax-dist launch [options] -- PROGRAM [its arguments]"""

_DESCRIPTION = """\
Starts the replicas of a job as processes, each of which runs your script. The
script calls optax_dist.coordinator.join(tx, params), which learns from the
environment which replica it is. Replicas that die are restarted, signals are
passed on, and output is prefixed by the replica's number. Ends with the job,
and with its exit code; no process is left behind, however it ends."""

_EPILOG = """\
On several hosts run the same command on each, with --nodes, --node-rank and
--address as for torchrun, or without them if JAX detects the cluster (SLURM,
GKE, TPU pods, Open MPI). The secret of the job, at least 16 bytes, is then
taken from --secret-file, OPTAX_DIST_SECRET_FILE or OPTAX_DIST_SECRET."""

_LOGS, _COMPILED = "replicas", "compiled"
# Seconds in which the processes of a launcher that was killed are ended.
_KILLED_WITHIN = 10.0


def add_parser(commands: Any) -> None:
  """Adds the ``launch`` command to the commands of a parser."""
  launch = parser.add_command(
    commands,
    "launch",
    run,
    help="start and supervise the replicas of your script",
    usage=_USAGE,
    description=_DESCRIPTION,
    epilog=_EPILOG,
  )
  options.add_options(launch)


def run(args: argparse.Namespace) -> int:
  """Runs the ``launch`` command with its parsed arguments."""
  command = _command(args.program, args.module)
  journal = _journal(args)
  # Slow imports follow.
  from optax_dist.cli.launch import job as jobs
  from optax_dist.coordinator.launch import keeper, launcher, supervisor
  from optax_dist.coordinator.transport import tls

  job = jobs.Job(args, journal)
  if job.certificates is not None:
    try:
      tls.check(job.certificates)
    except ValueError as error:
      raise errors.CommandError(f"launch: {error}") from None
  if args.standbys and args.processes_per_replica > 1:
    raise errors.CommandError(
      "launch: --standby is for replicas of one process; got"
      f" --processes-per-replica {args.processes_per_replica}"
    )
  with contextlib.ExitStack() as stack:
    lock = None
    if journal is not None:
      lock = stack.enter_context(_locked(journal.parent, job.placement.rank))
      if not job.placement.rank:
        # Elsewhere the run may have begun before this launcher has started.
        _check_journal(args, journal)
      job.note_writer(journal)
    launched = launcher.Launcher(
      command,
      job.placement,
      supervisor.Policy(job.needed, args.restarts),
      folder=args.output and args.output / _LOGS,
      log=keeper.Log(
        args.output and args.output / options.LOG,
        args.resume and job.placement.hosts > 1,
      ),
      standbys=args.standbys,
      environment=job.settings,
      env=_env(args),
      grace=args.grace,
      lock=lock,
    )
    try:
      return launched.run()
    except launcher.LaunchError as error:
      parser.say(str(error))
      return error.code
    except (RuntimeError, OSError, ValueError) as error:
      # Nothing can be started, or the coordinator can't.
      raise errors.CommandError(f"launch: {error}", exit_code=1) from error


def _env(args: argparse.Namespace) -> dict[str, str]:
  """Variables of the replicas, where the user has not set them."""
  variables = {"PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1")}
  folder = "JAX_COMPILATION_CACHE_DIR"
  if args.output is None or folder in os.environ:
    return variables
  if args.processes_per_replica > 1:
    return variables  # JAX keeps what the first process compiles.
  # Each host has its own folder, since its processors may differ.
  path = args.output.resolve() / _COMPILED / socket.gethostname()
  # By default JAX keeps only programs that take more than a second to compile.
  least = "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"
  return variables | {folder: str(path), least: os.environ.get(least, "0")}


def _command(program: list[str], module: bool) -> list[str]:
  """The command line of a replica."""
  if not program or program == ["--"]:
    raise errors.CommandError(
      "launch: what shall be launched? Give a script, -m and a module, or --"
      " and a program, after the options"
    )
  first = program[0]
  if module:
    return [sys.executable, "-m", *program]
  if first == "--":
    if shutil.which(program[1]) is None:
      raise errors.CommandError(
        f"launch: there is no program {program[1]} that can be run"
      )
    return program[1:]
  if not os.path.exists(first):
    raise errors.CommandError(
      f"launch: there is no script {first}; programs other than Python's"
      " come after --"
    )
  return [sys.executable, *program]


def _journal(args: argparse.Namespace) -> pathlib.Path | None:
  """The path of the journal, in a folder that can be written."""
  if args.output is None:
    if args.resume:
      raise errors.CommandError("launch: --resume needs --output")
    return None
  # Imports nothing slow.
  from optax_dist.coordinator._internal import files

  path = pathlib.Path(args.output, options.JOURNAL)
  try:
    args.output.mkdir(parents=True, exist_ok=True)
    for name in (options.JOURNAL, options.LOG):
      files.check_regular(args.output / name)
    path.open("ab").close()
  except FileExistsError as error:
    raise errors.CommandError(
      f"launch: --output {args.output}: it is a file, not a directory"
    ) from error
  except OSError as error:
    raise _unwritable(args.output, error) from error
  return path


def _check_journal(args: argparse.Namespace, path: pathlib.Path) -> None:
  """Refuses to mix the journal with that of an earlier run."""
  if not args.resume and path.stat().st_size:
    raise errors.CommandError(
      f"launch: --output {args.output} has the journal of an earlier run;"
      " --resume goes on there, or give another folder"
    )


def _locked(folder: pathlib.Path, rank: int) -> locks.Lock:
  """Keeps other jobs out of an output folder; each host of this one has a lock."""
  from optax_dist.coordinator._internal import locks

  path = folder / f".launch-{rank}"
  try:
    try:
      return locks.Lock(path, if_in_doubt=True)
    except locks.Held as error:
      if error.lives:
        raise
      # The other launcher was just killed, and its replicas are about to end.
      return locks.Lock(path, _KILLED_WITHIN, if_in_doubt=True)
  except locks.Held as error:
    raise errors.CommandError(
      f"launch: --output {folder}: {error.holder} uses it; end that job first, or"
      " give another folder"
    ) from None
  except OSError as error:
    raise _unwritable(folder, error) from error


def _unwritable(folder: pathlib.Path, error: OSError) -> errors.CommandError:
  return errors.CommandError(
    f"launch: --output {folder}: {error.filename or 'it'} can't be written:"
    f" {error.strerror}"
  )
