"""``optax-dist coordinator``: runs the coordinator of jobs, in the foreground."""

from __future__ import annotations

import argparse
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
  from optax_dist.cli.launch import job
  from optax_dist.coordinator.server import __main__ as program
  from optax_dist.coordinator.server import places, process

  try:
    variables = job.read_settings(args, os.environ)
    store = None
    if args.address is None:
      store = places.of_coordinator(args.store, variables.store)
    if args.address and args.store:
      raise ValueError("has either an --address, or a --store")
    more: dict[str, Any] = {
      "journal": args.journal,
      "certificates": variables.find_certificates(),
    }
    if store is not None:
      settings = process.Settings(bind=variables.local_addr, **more)
    elif args.address and args.output:
      args.output.mkdir(parents=True, exist_ok=True)
      log = os.fspath(args.output / options.LOG)
      settings = process.Settings.at(args.address, log=log, **more)
    else:
      raise ValueError("needs --address and --output, or --store")
    secret = (variables.find_secret() or "").encode()
  except (OSError, ValueError) as error:
    raise errors.CommandError(f"coordinator: {error}") from None
  return program.run(settings, secret, store)
