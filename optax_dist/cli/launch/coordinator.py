"""``optax-dist coordinator``: runs the coordinator of jobs, in the foreground."""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
from typing import Any

from optax_dist.cli import errors, parser
from optax_dist.cli.launch import options

_DESCRIPTION = """\
Coordinates replicas, for launchers with --no-coordinator and for programs that
call join with this address. It may be killed at any time: started again with the
same --output it goes on, and so do its replicas. The secret, at least 16 bytes, is
taken from --secret-file, OPTAX_DIST_SECRET_FILE or OPTAX_DIST_SECRET."""


def add_parser(commands: Any) -> None:
  """Adds the ``coordinator`` command to the commands of a parser."""
  command = parser.add_command(
    commands,
    "coordinator",
    run,
    help="run the coordinator of a job by itself",
    usage="optax-dist coordinator --address HOST:PORT --output DIR [options]\n"
    "       optax-dist coordinator --store URL [options]",
    description=_DESCRIPTION,
  )
  add = command.add_argument
  add(
    "--address",
    metavar="HOST:PORT",
    help="address by which replicas reach it",
  )
  add(
    "--output",
    metavar="DIR",
    type=pathlib.Path,
    help=f"folder for its log, {options.LOG}, with which it is started again",
  )
  add(
    "--store",
    metavar="URL",
    help="etcd://a:2379,b:2379,c:2379: log and address are there, and it stands by"
    " while another one coordinates; one with a password only in OPTAX_DIST_STORE",
  )
  add(
    "--journal",
    metavar="FILE",
    help="file for the events of the run (default: the one that its replicas name)",
  )
  add("--secret-file", metavar="FILE", type=pathlib.Path, help="its secret")
  options.add_certificates(command)


def run(args: argparse.Namespace) -> int:
  """Runs the ``coordinator`` command with its parsed arguments."""
  from optax_dist.coordinator.extras.hosts import nodes, placement
  from optax_dist.coordinator.launch import environment
  from optax_dist.coordinator.server import __main__ as program
  from optax_dist.coordinator.server import places, process

  try:
    told = environment.Environment.read()
    told = dataclasses.replace(
      told, certificates=args.certificates or told.certificates
    )
    files = told.find_certificates()
    store = None
    if args.address is None:
      store = places.of_coordinator(args.store, told.store)
    if store is None and not (args.address and args.output):
      raise ValueError("needs --address and --output, or --store")
    if args.address and args.store:
      raise ValueError("has either an --address, or a --store")
    secret = (
      environment.read_secret(args.secret_file)
      if args.secret_file
      else told.find_secret()
    )
    if store is not None:
      flags = [] if told.local_addr is None else ["--bind", told.local_addr]
    else:
      at = placement.listens(nodes.Node(address=args.address))
      args.output.mkdir(parents=True, exist_ok=True)
      flags = ["--bind", f"{at.bind}", "--port", str(at.port)]
      flags += ["--advertise", at.advertise or f"{at.bind}"]
      flags += ["--log", os.fspath(args.output / options.LOG)]
  except (OSError, ValueError) as error:
    raise errors.CommandError(f"coordinator: {error}") from None
  os.environ[process.STORE_VARIABLE] = store or ""
  flags += ["--journal", args.journal] if args.journal else []
  if files is not None:
    flags += ["--certificates", *files.files()]
  return program.main(flags, (secret or "").encode())
