"""The settings of a launched job, from arguments, environment and cluster."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
import pathlib
import secrets
from collections.abc import Mapping

from optax_dist.cli import errors
from optax_dist.coordinator import journal as journals
from optax_dist.coordinator.launch import environment, faults, placement
from optax_dist.coordinator.server import places

_SHORTEST = 16  # Bytes of a secret.


class Job:
  """A job with checked settings.

  Attributes:
    placement: what runs on this host.
    needed: how many replicas the job needs to continue.
    settings: the environment of all replicas.
    certificates: the files of this host; None for no encryption.
  """

  def __init__(
    self,
    args: argparse.Namespace,
    journal: pathlib.Path | None,
    environ: Mapping[str, str] | None = None,
  ):
    """Determines the settings.

    Args:
      args: the command's arguments.
      journal: path of the journal.
      environ: the environment; by default that of this process.

    Raises:
      errors.CommandError: something is missing or invalid.
    """
    environ = os.environ if environ is None else environ
    try:
      settings = read_settings(args, environ)
      where = self.placement = placement.find(
        settings, args.processes_per_replica, args.external
      )
      replicas = where.replicas
      if settings.faults is not None:
        faults.Faults.parse(settings.faults).check(replicas)
      secret = settings.find_secret()
      files = self.certificates = settings.find_certificates()
      store = places.of_coordinator(args.store, settings.store)
    except ValueError as error:
      raise errors.CommandError(f"{error}") from None
    aggregate = settings.replicas_to_aggregate or replicas
    self.needed = settings.min_replicas or min(aggregate, replicas)
    if self.needed > replicas:
      raise errors.CommandError(
        f"--min-replicas {self.needed} is more than the {replicas} replicas"
      )
    if args.external and (settings.store or not where.address):
      raise errors.CommandError(
        "--no-coordinator needs --address HOST:PORT, where optax-dist coordinator"
        " runs"
      )
    _check_secret(secret, where.hosts > 1 or args.external)
    run = None
    if settings.store is not None or args.external:
      run = _run_name(settings.run, environ)
      if run is None and where.hosts > 1:
        raise errors.CommandError(
          "several hosts with a coordinator that outlives the job need --run NAME,"
          " the same on all of them and a new one for each start of the job"
        )
      run = run or secrets.token_hex(8)
    output = args.output and args.output.resolve()
    self.settings = environment.Environment(
      store=store and places.load("keys").below(store, run or ""),
      secret=secret,
      certificates=None if files is None else os.pathsep.join(files.files()),
      run=run,
      replicas_to_aggregate=aggregate,
      min_replicas=settings.min_replicas,
      output=None if output is None else str(output),
      journal=None if journal is None else str(journal.resolve()),
      step_timeout=settings.step_timeout,
      faults=settings.faults,
      local_addr=where.local_addr,
    )

  def note_writer(self, path: pathlib.Path) -> None:
    """Writes beside a journal where the coordinator is that writes it.

    Args:
      path: the journal's, on this host, which need not be the coordinator's.
    """
    store = self.settings.store
    located = None if store is None else places.in_etcd(store)
    address = located or self.placement.address
    if address is not None:
      with contextlib.suppress(OSError):  # The training does without it.
        path.with_name(journals.WRITER).write_text(f"{address}\n", "utf-8")


def read_settings(
  args: argparse.Namespace, environ: Mapping[str, str]
) -> environment.Environment:
  """The settings by arguments or else by variables."""
  names = {field.name for field in dataclasses.fields(environment.Environment)}
  options = {
    name: value
    for name, value in vars(args).items()
    if value is not None and name in names
  }
  if "secret_file" in options:
    options["secret"] = None
  return dataclasses.replace(environment.Environment.read(environ), **options)


def _check_secret(secret: str | None, is_shared: bool) -> None:
  if is_shared and not secret:
    raise errors.CommandError(
      "several hosts need a secret, the same on all of them, and so does a"
      " coordinator that is there already: at least"
      f" {_SHORTEST} random bytes in --secret-file, OPTAX_DIST_SECRET_FILE or"
      " OPTAX_DIST_SECRET (openssl rand -hex 16 makes one)"
    )
  if secret and len(secret.encode()) < _SHORTEST:
    raise errors.CommandError(
      f"the secret must have at least {_SHORTEST} bytes; this one has"
      f" {len(secret.encode())}"
    )


def _run_name(name: str | None, environ: Mapping[str, str]) -> str | None:
  job = environ.get("SLURM_JOB_ID")
  if name or not job:
    return name
  return f"slurm-{job}.{environ.get('SLURM_RESTART_COUNT', '0')}"
