"""How a replica reaches the others, and the store."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import secrets
from collections.abc import Iterable, Iterator

from optax_dist.coordinator.protocol import arrivals
from optax_dist.coordinator.store import in_process as local_store
from optax_dist.coordinator.store import interface as stores
from optax_dist.coordinator.store import urls
from optax_dist.coordinator.transport import channels, sockets
from optax_dist.coordinator.transport import interface as transports


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """One replica's transport and store.

  Attributes:
    transport: to the other replicas.
    store: the key-value store.
  """

  transport: sockets.Transport
  store: stores.Store

  def close(self) -> None:
    """Closes the transport and the store."""
    self.store.close()
    self.transport.close()

  @contextlib.contextmanager
  def closed_on_error(self) -> Iterator[None]:
    """Closes both if the replica that is to use them can't be made."""
    try:
      yield
    except BaseException:
      self.close()
      raise


class World:
  """Connects replicas that are threads of one process."""

  def __init__(self) -> None:
    self._store = local_store.InProcessStore()

  def connect(self, name: str) -> Endpoint:
    """An endpoint for one replica."""
    unique = process_name(name)
    transport = sockets.Transport(unique)
    return Endpoint(transport, self._store.connect(unique))


def connect(
  place: urls.Place,
  replica: object,
  secret: bytes,
  silence: arrivals.Rule,
  *,
  bind: str | None = None,
  ports: Iterable[int] = sockets.DEFAULT_PORTS,
  advertise: str | None = None,
  certificates: channels.Certificates | None = None,
) -> Endpoint:
  """Creates an endpoint over sockets.

  Args:
    place: address of the store.
    replica: the replica's id.
    secret: of the job; may be empty if only this host can connect.
    silence: the rule for the seconds without a byte after which a peer is lost.
    bind: host name or IP address to listen on; None: loopback if the store is
      on loopback, and all addresses otherwise.
    ports: ports to try; the first free one is used.
    advertise: the address that other hosts use, a host or ``host:port``.
    certificates: encrypt all traffic that leaves this host.

  Raises:
    ValueError: an option is invalid; the message says why.
    OSError: no port is free.
  """
  name = process_name(replica)
  host = place.host
  heartbeat = min(1.0, silence.floor / 4)
  transport = sockets.Transport(
    name,
    secret=secret,
    bind=bind,
    ports=ports,
    advertise=advertise,
    towards=host,
    certificates=certificates,
    limits=transports.Limits(heartbeat=heartbeat, silence=silence),
  )
  return Endpoint(transport, open_store(place, transport, secret))


def open_store(
  place: urls.Place, transport: sockets.Transport, secret: bytes
) -> stores.Store:
  """Creates a client of the store; if it can't, it closes the transport.

  Args:
    place: address of the store.
    transport: of the client.
    secret: of the job.
  """
  try:
    return place.open(transport, secret)
  except BaseException:
    transport.close()
    raise


def process_name(replica: object) -> str:
  """A unique name for a process.

  Example:
    >>> process_name("a") == process_name("a")
    False
  """
  plain = "".join(c for c in str(replica)[:24] if c.isalnum() or c in "._-")
  return f"{plain}-{secrets.token_hex(8)}"


def key_prefix(run: str) -> str:
  """The prefix of a run's keys; several runs may share a store.

  Example:
    >>> key_prefix("")
    'run/'
  """
  if not run:
    return "run/"
  # A digest, since a name may contain any characters.
  return f"run-{hashlib.sha256(run.encode()).hexdigest()[:16]}/"
