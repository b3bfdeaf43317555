"""The environment variables `OPTAX_DIST_*` of a launched process.

`optax-dist launch` sets them, and `coordinator.join` uses them as defaults of
its arguments. Other launchers can set them, too.
"""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import typing
from collections.abc import Mapping
from typing import Annotated, Any, TypeAlias

import msgspec

from optax_dist.coordinator.protocol.codec import Natural, Positive
from optax_dist.coordinator.transport import tls

PREFIX = "OPTAX_DIST_"

_Seconds: TypeAlias = Annotated[
  float, msgspec.Meta(ge=0, le=sys.float_info.max)
]


@dataclasses.dataclass(frozen=True)
class Environment:
  """The variables of one process; None means not set.

  A field's variable is its name in capitals, prefixed by ``OPTAX_DIST_``.

  Attributes:
    coordinator_address: ``host:port`` of the coordinator, or a URL of etcd.
    store: for launchers and coordinators, that URL, such as
      ``etcd://a:2379,b:2379,c:2379``.
    secret: secret of the job, at least 16 bytes.
    secret_file: a file with the secret, if it is not in the environment.
    certificates: the paths of a certificate, its key and the job's authority,
      separated by colons; see `transport.tls.Certificates`.
    run: a name that keeps runs of one coordinator apart.
    num_replicas: number of replicas in the job.
    replica: the index of this one, from 0.
    replicas_to_aggregate: gradients in a step.
    min_replicas: smallest number of replicas with which the job continues.
    restarts: how often this replica was started before.
    standby: 1 for a process that waits until it becomes a replica; then it has
      no `replica` yet.
    num_processes: processes of each replica.
    process_index: index of this process in its replica, from 0.
    nodes: number of hosts of the job, for their launchers.
    node_rank: the index of this host, from 0, for its launcher.
    address: ``host:port`` of the coordinator, for the launchers.
    local_addr: the address of this host that its processes listen on, and that
      processes on other hosts use.
    output: output folder of the job, for example for checkpoints.
    journal: the file that the coordinator writes events to.
    grace: seconds from SIGTERM to SIGKILL.
    step_timeout: seconds after which a stuck step is ended; 0 for never.
    faults: faults to inject, for tests; see `launch.faults`.
    channel: the number of the file descriptor of the channel to the launcher.

  Example:
    >>> told = Environment(num_replicas=4, replica=2)
    >>> told.variables()
    {'OPTAX_DIST_NUM_REPLICAS': '4', 'OPTAX_DIST_REPLICA': '2'}
    >>> Environment.read(told.variables()) == told
    True
  """

  coordinator_address: str | None = dataclasses.field(default=None, repr=False)
  store: str | None = dataclasses.field(default=None, repr=False)
  secret: str | None = dataclasses.field(default=None, repr=False)
  secret_file: str | None = None
  certificates: str | None = None
  run: str | None = None
  num_replicas: Positive | None = None
  replica: Natural | None = None
  replicas_to_aggregate: Positive | None = None
  min_replicas: Positive | None = None
  restarts: Natural | None = None
  standby: Natural | None = None
  num_processes: Positive | None = None
  process_index: Natural | None = None
  nodes: Positive | None = None
  node_rank: Natural | None = None
  address: str | None = None
  local_addr: str | None = None
  output: str | None = None
  journal: str | None = None
  grace: _Seconds | None = None
  step_timeout: _Seconds | None = None
  faults: str | None = None
  channel: Natural | None = None

  def __post_init__(self) -> None:
    for name, of in (
      ("replica", "num_replicas"),
      ("process_index", "num_processes"),
    ):
      value, count = getattr(self, name), getattr(self, of)
      if value is not None and count is not None and not 0 <= value < count:
        raise ValueError(
          f"{variable(name)} must be from 0 to {count - 1}, because"
          f" {variable(of)} is {count}; got {value}."
        )
    if (self.num_processes or 1) > 1 and self.process_index is None:
      raise ValueError(
        f"{variable('num_processes')} is {self.num_processes}; then"
        f" {variable('process_index')} must be set, too."
      )

  @classmethod
  def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
    """Reads the variables; empty ones count as not set.

    Args:
      environ: the environment; by default that of this process.

    Raises:
      ValueError: a variable is invalid; the message names it.
    """
    environ = os.environ if environ is None else environ
    found: dict[str, Any] = {}
    kinds = typing.get_type_hints(cls, include_extras=True)
    for name, kind in kinds.items():
      text = environ.get(variable(name), "")
      try:
        if text:
          found[name] = msgspec.convert(text, kind, strict=False)
      except msgspec.ValidationError as error:
        raise ValueError(f"{variable(name)} is {text!r}: {error}.") from None
    return cls(**found)

  def variables(self) -> dict[str, str]:
    """The variables, as entries of a process's environment."""
    values = dataclasses.asdict(self)
    return {
      variable(name): f"{value:g}" if isinstance(value, float) else str(value)
      for name, value in values.items()
      if value is not None
    }

  def find_secret(self) -> str | None:
    """The secret, from its variable or its file.

    Raises:
      ValueError: the file can't be read, or is empty.
    """
    if self.secret is not None or self.secret_file is None:
      return self.secret
    return read_secret(self.secret_file)

  def find_certificates(self) -> tls.Certificates | None:
    """The certificates, of absolute paths; None if there are none.

    Raises:
      ValueError: there are not three paths.
    """
    if self.certificates is None:
      return None
    paths = self.certificates.split(os.pathsep)
    if len(paths) != 3 or not all(paths):
      raise ValueError(
        f"{variable('certificates')} must be the paths of a certificate, its key"
        " and the authority, as in me.pem:me.key:ca.pem; got"
        f" {self.certificates!r}."
      )
    return tls.Certificates(*map(os.path.abspath, paths))


def variable(field: str) -> str:
  """The name of a field's variable.

  Example:
    >>> variable("num_replicas")
    'OPTAX_DIST_NUM_REPLICAS'
  """
  return PREFIX + field.upper()


def read_secret(path: str | os.PathLike[str]) -> str:
  """The secret in a file, without surrounding white space.

  Raises:
    ValueError: it can't be read, or is empty.
  """
  try:
    text = pathlib.Path(path).read_text().strip()
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"The secret in {path} can't be read: {error}.") from None
  if not text:
    raise ValueError(f"The secret's file {path} is empty.")
  return text
