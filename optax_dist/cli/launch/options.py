"""The options of ``optax-dist launch``."""

from __future__ import annotations

import argparse
import os
import pathlib
from typing import Any

from optax_dist.cli import parser

JOURNAL, LOG = "journal.jsonl", "coordinator.log"


def add_options(launch: argparse.ArgumentParser) -> None:
  """Adds all options, and the program with its arguments.

  An option that replaces a variable is named after its field of `Environment`.
  """
  _add_replicas(launch)
  _add_job(launch)
  _add_hosts(launch)
  launch.add_argument(
    "-m", dest="module", action="store_true", help=argparse.SUPPRESS
  )
  launch.add_argument(
    "program", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
  )


def _add_replicas(launch: argparse.ArgumentParser) -> None:
  add = launch.add_argument
  count = parser.whole_number(1)
  add(
    "--replicas",
    dest="num_replicas",
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
    "--standby",
    dest="standbys",
    metavar="N",
    type=parser.whole_number(0),
    default=0,
    help="processes of your script on this host that have imported and compiled,"
    " and wait in join for the number of a replica that dies (default: 0)",
  )


def _add_job(launch: argparse.ArgumentParser) -> None:
  add = launch.add_argument
  add(
    "--chaos",
    dest="faults",
    metavar="FAULTS",
    help="inject faults into the replicas: kill:REPLICA@GRADIENT,"
    " slow:REPLICAxFACTOR; such as kill:1@40,slow:2x5",
  )
  add(
    "--output",
    metavar="DIR",
    type=pathlib.Path,
    help=f"folder for {JOURNAL}, the coordinator's log and the replicas' output;"
    " the script gets it as"
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
  group = launch.add_argument_group("several hosts, and where they meet")
  add = group.add_argument
  add(
    "--nodes",
    "--nnodes",
    metavar="N",
    type=parser.whole_number(1),
    help="number of hosts (default: OPTAX_DIST_NODES, or as detected by JAX)",
  )
  add(
    "--node-rank",
    "--node_rank",
    metavar="R",
    type=parser.whole_number(0),
    help="index of this host, from 0 (default: OPTAX_DIST_NODE_RANK)",
  )
  add(
    "--address",
    "--rdzv-endpoint",
    "--rdzv_endpoint",
    metavar="HOST:PORT",
    help="address of the coordinator on host 0 (default: OPTAX_DIST_ADDRESS)",
  )
  add(
    "--no-coordinator",
    dest="external",
    action="store_true",
    help="start no coordinator: optax-dist coordinator runs at --address",
  )
  add(
    "--local-addr",
    "--local_addr",
    metavar="ADDRESS",
    help="address of this host in the network between replicas, if it"
    " has several (default: OPTAX_DIST_LOCAL_ADDR, or the one from which it reaches"
    " the coordinator)",
  )
  add(
    "--store",
    metavar="URL",
    help="keeps log and address of the coordinator in etcd, where each launcher"
    " stands by: etcd://a:2379,b:2379,c:2379; one with a password only in the"
    " variable (default:"
    " OPTAX_DIST_STORE)",
  )
  add(
    "--run",
    metavar="NAME",
    help="separates runs of one coordinator: a new name for each start of a job"
    " (default: OPTAX_DIST_RUN, or SLURM's job and restart)",
  )
  what = "file with the secret of the job; for several hosts"
  add("--secret-file", metavar="FILE", type=pathlib.Path, help=what)
  add_certificates(group)


class _Paths(argparse.Action):
  """Joins paths as the variable has them."""

  def __call__(
    self, parser: Any, args: Any, paths: Any, flag: Any = None
  ) -> None:
    setattr(args, self.dest, os.pathsep.join(paths))


def add_certificates(to: Any) -> None:
  """Adds the option of certificates to a command, or to a group of it."""
  to.add_argument(
    "--certificates",
    nargs=3,
    action=_Paths,
    metavar=("CERTIFICATE", "KEY", "AUTHORITY"),
    help="PEM files of this host, and of the job's authority, by which all that"
    " leaves the host is encrypted; they are read again when they change"
    " (default: OPTAX_DIST_CERTIFICATES, the three paths with colons between)",
  )
