"""``optax-dist launch``: starts and supervises a script's replicas."""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NoReturn

from optax_dist.cli import errors, parser, reported
from optax_dist.cli.launch import chaos
from optax_dist.cli.launch import program as programs

_USAGE = """\
optax-dist launch [options] SCRIPT.py [its arguments]
       optax-dist launch [options] -m MODULE [its arguments]
       optax-dist launch [options] -- PROGRAM [its arguments]"""

_DESCRIPTION = """\
Starts the replicas of a job as processes, each of which runs your script. The
script calls optax_dist.coordinator.join(tx, params), which learns from the
environment which replica it is. Replicas that die are restarted, signals are passed
on, and output is prefixed by the replica's number. Ends with the job, and with
its exit code; no process is left behind, however it ends."""

_EPILOG = """\
On several hosts run the same command on each, with --nodes, --node-rank and
--address as for torchrun, or without them if JAX detects the cluster (SLURM, GKE,
TPU pods, Open MPI). The secret of the job, at least 16 bytes, is then taken from
--secret-file, OPTAX_DIST_SECRET_FILE or OPTAX_DIST_SECRET."""

_LOGS = "replicas"
JOURNAL = "journal.jsonl"


def add_parser(commands: Any, argv: Sequence[str]) -> list[str]:
  """Adds the ``launch`` command to the commands of a parser.

  Args:
    commands: what ``add_subparsers`` returned.
    argv: the arguments that will be parsed.

  Returns:
    The arguments without the program to launch and its own arguments.
  """
  launch = parser.add_command(
    commands,
    "launch",
    run,
    help="start and supervise the replicas of your script",
    usage=_USAGE,
    description=_DESCRIPTION,
    epilog=_EPILOG,
  )
  _add_job(launch)
  reported.add_arguments(launch)
  _add_hosts(launch)
  own, program = programs.split(launch, argv)
  launch.set_defaults(program=program)
  return own


def _add_job(launch: argparse.ArgumentParser) -> None:
  add = launch.add_argument
  count = parser.whole_number(1)
  add(
    "--replicas",
    metavar="N",
    type=count,
    help="replicas of the job, on all hosts (default: one per host)",
  )
  add(
    "--replicas-to-aggregate",
    metavar="K",
    type=count,
    help="gradients in a step (default: all)",
  )
  add(
    "--min-replicas",
    metavar="N",
    type=count,
    help="replicas that the job needs to continue; if that is less than K, steps"
    " take fewer gradients while replicas are lost (default: K)",
  )
  parser.add_number(
    launch,
    "--processes-per-replica",
    "M",
    count,
    default=1,
    help="processes of each replica; if one dies, all of them restart",
  )
  parser.add_number(
    launch,
    "--restarts",
    "N",
    parser.whole_number(0),
    default=10,
    help="restarts of replicas allowed in total; the pause before one doubles"
    " while a replica keeps failing",
  )
  add(
    "--chaos",
    metavar="FAULTS",
    type=chaos.parse,
    help="inject faults into the replicas: kill:P and stop:P with a probability"
    " for each gradient, slow:REPLICAxFACTOR; such as kill:0.02,slow:2x5",
  )
  add(
    "--output",
    metavar="DIR",
    type=pathlib.Path,
    help=f"folder for {JOURNAL} and the replicas' output; the script gets it as"
    " OPTAX_DIST_OUTPUT, for its checkpoints",
  )
  add(
    "--resume",
    action="store_true",
    help="continue in an --output with an earlier run, which is otherwise"
    " refused",
  )
  parser.add_number(
    launch,
    "--grace",
    "SECONDS",
    parser.positive_float,
    default=30.0,
    help="time from SIGTERM or Ctrl-C, which are passed on, to SIGKILL",
  )
  add(
    "--step-timeout",
    metavar="SECONDS",
    type=parser.non_negative_float,
    help="how long a step may take inside a replica, which otherwise prints where"
    " it is stuck, and restarts; 0 for no limit (default: ten times"
    " what 99%% take, while others wait)",
  )


def _add_hosts(launch: argparse.ArgumentParser) -> None:
  group = launch.add_argument_group("several hosts, and stores")
  add = group.add_argument
  add(
    "--nodes",
    metavar="N",
    type=parser.whole_number(1),
    help="number of hosts (default: OPTAX_DIST_NODES, or as detected by JAX)",
  )
  add(
    "--node-rank",
    metavar="R",
    type=parser.whole_number(0),
    help="index of this host, from 0 (default: OPTAX_DIST_NODE_RANK)",
  )
  add(
    "--nodes-per-replica",
    metavar="N",
    type=parser.whole_number(1),
    help="hosts over which the processes of a replica are spread (default: 1,"
    " or with fewer replicas than hosts as many as there are for each)",
  )
  parser.add_number(
    group,
    "--host-timeout",
    "SECONDS",
    parser.positive_float,
    default=60.0,
    help="for replicas on several hosts: how long a host may be silent"
    " before its replicas are restarted, or given up",
  )
  add(
    "--address",
    metavar="HOST:PORT",
    help="address of the store on host 0 (default: OPTAX_DIST_ADDRESS)",
  )
  add(
    "--local-addr",
    metavar="ADDRESS",
    help="address of this host in the network between replicas, if it"
    " has several (default: OPTAX_DIST_LOCAL_ADDR, or the one from which it reaches"
    " the store)",
  )
  add(
    "--store",
    metavar="URL",
    help="another store, such as etcd://a:2379,b:2379,c:2379 (default:"
    " OPTAX_DIST_STORE)",
  )
  add(
    "--run",
    dest="run_name",
    metavar="NAME",
    help="keeps runs on one store apart: a new name for each start of a job"
    " (default: OPTAX_DIST_RUN, or SLURM's job and restart)",
  )
  what = "file with the secret of the job; for several hosts"
  parser.add_file(group, "--secret-file", what)
  add("--secret", help=argparse.SUPPRESS, type=_refuse)


def _refuse(text: str) -> NoReturn:
  raise argparse.ArgumentTypeError(
    "on the command line everyone on the host can read it; put it into a file"
    " for --secret-file, or into OPTAX_DIST_SECRET"
  )


def run(args: argparse.Namespace) -> int:
  """Runs the ``launch`` command with its parsed arguments."""
  command = programs.command(args.program)
  journal = _journal(args)
  # Slow imports follow.
  from optax_dist.cli.launch import job as jobs
  from optax_dist.cli.launch import shown
  from optax_dist.coordinator.launch import launcher, placement

  with (
    shown.Shown(journal, needed=reported.wanted(args)) as screen,
    reported.reporting(args, screen.journal),
  ):
    job = jobs.Job(args, screen.journal)
    launched = launcher.Launcher(
      command,
      job.placement(args, lambda line: screen.echo("launch", line, True)),
      folder=args.output and args.output / _LOGS,
      told=job.told,
      env={"PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1")},
      needed=job.needed,
      restarts=args.restarts,
      grace=args.grace,
      echo=screen.echo,
      on_tick=screen.update,
    )
    try:
      return launched.run()
    except placement.LaunchError as error:
      parser.say(str(error))
      return error.code
    except RuntimeError as error:  # The store can't listen.
      raise errors.CommandError(f"launch: {error}", exit_code=1) from error


def _journal(args: argparse.Namespace) -> pathlib.Path | None:
  """The path of the journal; refuses to mix it with that of an earlier run."""
  if args.output is None:
    if args.resume:
      raise errors.CommandError("launch: --resume needs --output")
    return None
  path = pathlib.Path(args.output, JOURNAL)
  try:
    args.output.mkdir(parents=True, exist_ok=True)
    path.open("ab").close()
  except FileExistsError as error:
    raise errors.CommandError(
      f"launch: --output {args.output}: it is a file, not a directory"
    ) from error
  except OSError as error:
    raise errors.CommandError(
      f"launch: --output {args.output}: can't be written: {error.strerror}"
    ) from error
  if not args.resume and path.exists() and path.stat().st_size:
    raise errors.CommandError(
      f"launch: --output {args.output} has the journal of an earlier run;"
      " --resume goes on there, or give another folder"
    )
  return path
