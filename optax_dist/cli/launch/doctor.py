"""``optax-dist doctor``: checks the hosts of a job before the job."""

from __future__ import annotations

import argparse
import itertools
from typing import Any

from optax_dist.cli import errors, parser
from optax_dist.cli.launch import options

_DESCRIPTION = """\
Run it on each host, at the same time, with the options of optax-dist launch.
It checks that the coordinator's name resolves, that its port can be reached
with this secret, that all hosts have the same settings and versions, that their
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
  parser.add_number(
    command,
    "--host-timeout",
    "SECONDS",
    parser.positive_float,
    default=60.0,
    help="how long to wait for the other hosts",
  )


def run(args: argparse.Namespace) -> int:
  """Runs the ``doctor`` command with its parsed arguments."""
  from optax_dist.cli.launch import job as jobs

  job = jobs.Job(args, None)
  if job.placement.hosts == 1:
    raise errors.CommandError(
      "doctor: there is one host only: give --nodes, --node-rank and --address"
    )
  if args.external or job.placement.address is None:
    raise errors.CommandError(
      "doctor: hosts meet at --address HOST:PORT, an address of host 0"
    )
  from optax_dist.coordinator.extras.hosts import doctor

  secret = job.settings.secret
  assert secret is not None
  equal = doctor.settings(job.placement, job.settings)
  store = job.settings.store
  findings = itertools.chain(
    [doctor.check_etcd(store)] if store else [],
    doctor.check(
      job.placement,
      equal,
      secret=secret.encode(),
      certificates=job.certificates,
      timeout=args.host_timeout,
    ),
  )
  good = True
  for finding in findings:
    good &= finding.good
    print(f"[{'ok' if finding.good else 'FAILED'}] {finding.line}", flush=True)
  print("all is good" if good else "see the lines with FAILED")
  return 0 if good else 1
