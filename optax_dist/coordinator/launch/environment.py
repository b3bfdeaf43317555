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
  """What the processes of a job have in common; None means not set.

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
    replicas_to_aggregate: gradients in a step.
    min_replicas: smallest number of replicas with which the job continues.
    local_addr: the address of this host that its processes listen on, and that
      processes on other hosts use.
    output: output folder of the job, for example for checkpoints.
    journal: the file that the coordinator writes events to.
    grace: seconds from SIGTERM to SIGKILL.
    step_timeout: seconds after which a stuck step is ended; 0 for never.
    faults: faults to inject, for tests; see `launch.faults`.
    nodes: for launchers, the number of hosts of the job.
    node_rank: for launchers, the index of this host, from 0.
    address: for launchers, ``host:port`` of the coordinator.

  Example:
    >>> environment = Environment(num_replicas=4, run="first")
    >>> environment.variables()
    {'OPTAX_DIST_RUN': 'first', 'OPTAX_DIST_NUM_REPLICAS': '4'}
    >>> Environment.read(environment.variables()) == environment
    True
  """

  coordinator_address: str | None = dataclasses.field(default=None, repr=False)
  store: str | None = dataclasses.field(default=None, repr=False)
  secret: str | None = dataclasses.field(default=None, repr=False)
  secret_file: str | None = None
  certificates: str | None = None
  run: str | None = None
  num_replicas: Positive | None = None
  replicas_to_aggregate: Positive | None = None
  min_replicas: Positive | None = None
  local_addr: str | None = None
  output: str | None = None
  journal: str | None = None
  grace: _Seconds | None = None
  step_timeout: _Seconds | None = None
  faults: str | None = None
  nodes: Positive | None = None
  node_rank: Natural | None = None
  address: str | None = None

  @classmethod
  def read(cls, environ: Mapping[str, str] | None = None) -> Environment:
    """Reads the variables; empty ones count as not set.

    Args:
      environ: the environment; by default that of this process.

    Raises:
      ValueError: a variable is invalid; the message names it.
    """
    return cls(**_read(cls, environ))

  def variables(self) -> dict[str, str]:
    """The variables, as entries of a process's environment."""
    return _variables(dataclasses.asdict(self))

  def find_secret(self) -> str | None:
    """The secret, from its variable or its file, without white space around it.

    Raises:
      ValueError: it can't be read, is empty, or no text.
    """
    if self.secret is not None:
      return _secret_of(os.fsencode(self.secret), variable("secret"))
    if self.secret_file is None:
      return None
    try:
      raw = pathlib.Path(self.secret_file).read_bytes()
    except OSError as error:
      raise ValueError(
        f"The secret in {self.secret_file} can't be read: {error}."
      ) from None
    return _secret_of(raw, self.secret_file)

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


@dataclasses.dataclass(frozen=True)
class ProcessEnvironment:
  """Which process of a job one is.

  Attributes:
    replica: the index of its replica, from 0.
    restarts: how often this replica was started before.
    standby: 1 for a process that waits until it becomes a replica; then it has
      no `replica` yet.
    num_processes: processes of each replica.
    process_index: index of this process in its replica, from 0.
    channel: the number of the file descriptor of the channel to the launcher.
  """

  replica: Natural | None = None
  restarts: Natural | None = None
  standby: Natural | None = None
  num_processes: Positive | None = None
  process_index: Natural | None = None
  channel: Natural | None = None

  def __post_init__(self) -> None:
    count, index = self.num_processes or 1, self.process_index
    if count > 1 and index is None:
      raise ValueError(
        f"{variable('num_processes')} is {count}; then"
        f" {variable('process_index')} must be set, too."
      )
    if self.num_processes is not None and not 0 <= (index or 0) < count:
      raise ValueError(
        f"{variable('process_index')} must be from 0 to {count - 1}, because"
        f" {variable('num_processes')} is {count}; got {index}."
      )

  @classmethod
  def read(cls, environ: Mapping[str, str] | None = None) -> ProcessEnvironment:
    """Reads the variables; see `Environment.read`."""
    return cls(**_read(cls, environ))

  def variables(self) -> dict[str, str]:
    """The variables, as entries of a process's environment."""
    return _variables(dataclasses.asdict(self))


def _read(kind: type, environ: Mapping[str, str] | None) -> dict[str, Any]:
  environ = os.environ if environ is None else environ
  values: dict[str, Any] = {}
  for name, hint in typing.get_type_hints(kind, include_extras=True).items():
    text = environ.get(variable(name), "")
    try:
      if text:
        values[name] = msgspec.convert(text, hint, strict=False)
    except msgspec.ValidationError as error:
      raise ValueError(f"{variable(name)} is {text!r}: {error}.") from None
  return values


def _variables(values: Mapping[str, Any]) -> dict[str, str]:
  return {
    variable(name): f"{value:g}" if isinstance(value, float) else str(value)
    for name, value in values.items()
    if value is not None
  }


def inherited() -> dict[str, str]:
  """The environment, without what tells this process of a job that it is in itself.

  A launcher may run within another job, whose number of a process, say, would be taken
  for one of its own. What is for launchers stays.
  """
  kinds = Environment, ProcessEnvironment
  fields = {field.name for kind in kinds for field in dataclasses.fields(kind)}
  names = set(map(variable, fields - {"nodes", "node_rank", "address"}))
  return {name: x for name, x in os.environ.items() if name not in names}


def variable(field: str) -> str:
  """The name of a field's variable.

  Example:
    >>> variable("num_replicas")
    'OPTAX_DIST_NUM_REPLICAS'
  """
  return PREFIX + field.upper()


def _secret_of(raw: bytes, where: object) -> str:
  # The same from a file, with the end of a line, and from a variable.
  try:
    secret = raw.decode().strip()
  except UnicodeDecodeError:
    secret = ""
  if not secret:
    raise ValueError(
      f"The secret in {where} is empty, or no text in UTF-8. One is made by"
      " openssl rand -hex 16."
    )
  return secret
