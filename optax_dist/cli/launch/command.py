"""``optax-dist launch``: starts and supervises a script's replicas."""

from __future__ import annotations

import argparse
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NoReturn

from optax_dist.cli import errors, output, parser, reported
from optax_dist.cli.launch import chaos
from optax_dist.cli.launch import program as programs

_USAGE = """\
optax-dist launch [options] SCRIPT.py [its arguments]
       optax-dist launch [options] -m MODULE [its arguments]
       optax-dist launch [options] -- PROGRAM [its arguments]"""

_DESCRIPTION = """\
Starts the replicas of a job as processes, each of which runs your script. The
script calls optax_dist.coordinator.join(tx, params), which learns from the
environment which replica it is. What dies is started again; signals are passed on;
what replicas print has their number before it. Ends with the job, and with
its exit code; nothing is left behind, however it ends."""

_EPILOG = """\
On several hosts run the same command on each, with --nodes, --node-rank and
--address as for torchrun, or without where JAX knows the cluster (SLURM, GKE, TPU
pods, Open MPI). The secret of the job, at least 16 bytes, is then taken from
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
    help="start the replicas of your own script, and mind them",
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
    help="of the job, on all hosts together (default: one on each host)",
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
    help="the job goes on while there are so many; if that is less than K, steps"
    " take fewer gradients while replicas are lost (default: K)",
  )
  parser.add_number(
    launch,
    "--processes-per-replica",
    "M",
    count,
    default=1,
    help="processes of each replica; if one dies, all of them start again",
  )
  parser.add_number(
    launch,
    "--restarts",
    "N",
    parser.whole_number(0),
    default=10,
    help="replicas that may be started again, in all; with pauses that double"
    " while one keeps failing",
  )
  add(
    "--chaos",
    metavar="FAULTS",
    type=chaos.parse,
    help="inflict faults on the replicas: kill:P and stop:P with a probability"
    " for each gradient, slow:REPLICAxFACTOR; such as kill:0.02,slow:2x5",
  )
  add(
    "--output",
    metavar="DIR",
    type=pathlib.Path,
    help=f"keep {JOURNAL} and what replicas print; the script finds it as"
    " OPTAX_DIST_OUTPUT, for its checkpoints",
  )
  add(
    "--resume",
    action="store_true",
    help="go on in an --output that has an earlier run; without it, that is"
    " refused",
  )
  parser.add_number(
    launch,
    "--grace",
    "SECONDS",
    parser.positive_float,
    default=30.0,
    help="from SIGTERM or Ctrl-C, which are passed on, to SIGKILL",
  )
  add(
    "--step-timeout",
    metavar="SECONDS",
    type=parser.non_negative_float,
    help="how long a step may take inside a replica: one that takes longer is"
    " stuck, says where, and starts again; 0 for any time (default: ten times"
    " what 99%% take, while others wait)",
  )


def _add_hosts(launch: argparse.ArgumentParser) -> None:
  group = launch.add_argument_group("several hosts, and stores")
  add = group.add_argument
  add(
    "--nodes",
    metavar="N",
    type=parser.whole_number(1),
    help="how many hosts there are (default: OPTAX_DIST_NODES, or what JAX finds)",
  )
  add(
    "--node-rank",
    metavar="R",
    type=parser.whole_number(0),
    help="which of them this is, from 0 (default: OPTAX_DIST_NODE_RANK)",
  )
  add(
    "--nodes-per-replica",
    metavar="N",
    type=parser.whole_number(1),
    help="hosts over which the processes of a replica are shared out (default: 1,"
    " or with fewer replicas than hosts as many as there are for each)",
  )
  parser.add_number(
    group,
    "--host-timeout",
    "SECONDS",
    parser.positive_float,
    default=60.0,
    help="of replicas on several hosts: how long a host may not be heard of"
    " before its replicas are started again, or given up",
  )
  add(
    "--address",
    metavar="HOST:PORT",
    help="of the store, which host 0 starts there (default: OPTAX_DIST_ADDRESS)",
  )
  add(
    "--local-addr",
    metavar="ADDRESS",
    help="of this host in the network by which replicas reach each other, if it"
    " has several (default: OPTAX_DIST_LOCAL_ADDR, or the one by which it reaches"
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
  add(
    "--secret-file",
    metavar="FILE",
    type=pathlib.Path,
    help="has the secret of the job; for several hosts",
  )
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
  from optax_dist.coordinator.launch import launcher, spread

  with (
    shown.Shown(journal, needed=reported.wanted(args)) as screen,
    reported.reporting(args, screen.journal),
  ):
    job = jobs.Job(args, screen.journal)
    launched = launcher.Launcher(
      command,
      job.replicas,
      folder=args.output and args.output / _LOGS,
      told=job.told,
      env={"PYTHONUNBUFFERED": os.environ.get("PYTHONUNBUFFERED", "1")},
      node=job.node,
      processes=args.processes_per_replica,
      nodes_per_replica=args.nodes_per_replica,
      patience=spread.Patience(
        max(spread.Patience.meet, args.host_timeout), args.host_timeout
      ),
      needed=job.needed,
      restarts=args.restarts,
      grace=args.grace,
      linger=None,
      echo=screen.echo,
      on_tick=screen.update,
    )
    try:
      return launched.run().code
    except launcher.LaunchError as error:
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
  (path,) = output.prepare(args.output, [JOURNAL])
  if not args.resume and path.exists() and path.stat().st_size:
    raise errors.CommandError(
      f"launch: --output {args.output} has the journal of an earlier run;"
      " --resume goes on there, or give another folder"
    )
  return path
