"""``optax-dist doctor``: checks the hosts of a job before the job."""

from __future__ import annotations

import argparse
from typing import Any

from optax_dist.cli import errors, parser
from optax_dist.cli.launch import options

_DESCRIPTION = """\
Run it on each host, at the same time, with the options of optax-dist launch.
It checks that the store's name resolves, that its port can be reached with
this secret, that all hosts have the same settings and versions, that their
clocks agree, and that they reach each other. Exits with 0 if all is good, and
otherwise says what to do."""


def add_parser(commands: Any) -> None:
  """Adds the ``doctor`` command to the commands of a parser."""
  command = parser.add_command(
    commands,
    "doctor",
    run,
    help="check the hosts of a job before it",
    usage="optax-dist doctor [options of launch]",
    description=_DESCRIPTION,
  )
  options.add_options(command)


def run(args: argparse.Namespace) -> int:
  """Runs the ``doctor`` command with its parsed arguments."""
  from optax_dist.cli.launch import job as jobs

  job = jobs.Job(args, None)
  if job.node.count == 1:
    raise errors.CommandError(
      "doctor: there is one host only: give --nodes, --node-rank and --address"
    )
  from optax_dist.coordinator.extras.hosts import doctor, placement

  settings = job.settings
  assert settings.secret is not None
  good = True
  for found in doctor.check(
    job.node,
    placement.launcher_notice(
      job.node, job.replicas, args.processes_per_replica, settings
    ),
    secret=settings.secret,
    store=settings.store,
    run=f"{settings.run or ''}-doctor",
    timeout=args.host_timeout,
  ):
    good &= found.good
    print(f"[{'ok' if found.good else 'FAILED'}] {found.line}", flush=True)
  print("all is good" if good else "see the lines with FAILED")
  return 0 if good else 1
