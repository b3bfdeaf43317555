"""How a replica reaches other replicas and its coordinator."""

from __future__ import annotations

import contextlib
import dataclasses
import secrets
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from optax_dist.coordinator.protocol import liveness
from optax_dist.coordinator.server import driver, places
from optax_dist.coordinator.transport import addresses, sockets, tls
from optax_dist.coordinator.transport import interface as transports

#: The name of the coordinator's process.
COORDINATOR = driver.NAME
# Seconds to wait for a closing thread.
_CLOSE_SECONDS = 5.0


@dataclasses.dataclass(frozen=True)
class Endpoint:
  """One replica's transport, and where its coordinator is.

  Attributes:
    transport: sends to other processes, and receives.
    coordinator: address of the coordinator, or the URL of etcd, which has it.
    restart: starts the coordinator again, if this process may; it must not wait.
    finder: looks up the coordinator's address, if it may change; None otherwise.
  """

  transport: sockets.Transport
  coordinator: str
  restart: Callable[[], None] | None = None
  finder: Any = None

  def connect(self, peer: str, address: str) -> None:
    """Connects to a peer, or to the coordinator."""
    if peer == COORDINATOR:
      # The coordinator can't know the run's nonce before it has read its log.
      finds = address if self.finder is None else self.finder.find
      self.transport.connect(peer, finds, b"")
    else:
      self.transport.connect(peer, address)

  def revive(self, how: transports.How) -> None:
    """Starts the coordinator again if it has died, and this process may."""
    if self.restart is not None and how in ("broken", "unreachable", "gone"):
      self.restart()

  def close(self, reason: str = "") -> None:
    """Closes the transport; peers get the reason."""
    if self.finder is not None:
      self.finder.close()
    self.transport.close(reason)

  @contextlib.contextmanager
  def closed_on_error(self) -> Iterator[None]:
    """Closes the endpoint if the replica that is to use it can't be created."""
    try:
      yield
    except BaseException:
      self.close()
      raise


class World:
  """Connects replicas that are threads of one process, with a coordinator."""

  def __init__(self) -> None:
    """Starts the coordinator, in a thread."""
    self._ended = threading.Event()
    self._transport = sockets.Transport(COORDINATOR)
    self._thread = threading.Thread(
      target=driver.serve,
      args=(self._transport, self._ended),
      name="optax-dist-coordinator",
      daemon=True,
    )
    self._thread.start()

  def connect(self, name: str) -> Endpoint:
    """An endpoint for one replica."""
    transport = sockets.Transport(process_name(name), server=COORDINATOR)
    return Endpoint(transport, self._transport.address)

  def close(self) -> None:
    """Ends the coordinator, and waits for its thread."""
    self._ended.set()
    self._transport.wake()
    self._thread.join(_CLOSE_SECONDS)

  def __enter__(self) -> World:
    return self

  def __exit__(self, *error: object) -> None:
    self.close()


def connect(
  coordinator: str,
  replica: object,
  secret: bytes,
  silence: liveness.Rule,
  *,
  bind: str | None = None,
  ports: Iterable[int] = sockets.DEFAULT_PORTS,
  advertise: str | None = None,
  certificates: tls.Certificates | None = None,
  restart: Callable[[], None] | None = None,
) -> Endpoint:
  """Creates an endpoint over sockets.

  Args:
    coordinator: address of the coordinator, ``host:port``, or a URL of etcd.
    replica: the replica's id.
    secret: the job's secret; may be empty if only this host can connect.
    silence: the rule for the seconds without a byte after which a peer is lost.
    bind: host name or IP address to listen on; None: loopback if the coordinator
      is on loopback, and all addresses otherwise.
    ports: ports to try; the first free one is used.
    advertise: the address that other hosts use, a host or ``host:port``.
    certificates: encrypt all traffic that leaves this host.
    restart: see `Endpoint`.

  Raises:
    ValueError: an option is invalid; the message says why.
    OSError: no port is free.
  """
  keys = places.in_etcd(coordinator)
  if keys is None:
    host = addresses.endpoint(coordinator).host
  else:
    host = keys.host
  heartbeat = min(1.0, silence.floor / 4)
  transport = sockets.Transport(
    process_name(replica),
    secret=secret,
    bind=bind,
    ports=ports,
    advertise=advertise,
    towards=host,
    certificates=certificates,
    server=COORDINATOR,
    limits=transports.Limits(heartbeat=heartbeat, silence=silence),
  )
  if keys is None:
    return Endpoint(transport, coordinator, restart)
  try:
    finder = places.load("finder").Finder(keys, secret, transport.wake)
  except BaseException:
    transport.close()
    raise
  return Endpoint(transport, str(keys), restart, finder)


def process_name(replica: object) -> str:
  """A unique name for a process.

  Example:
    >>> process_name("a") == process_name("a")
    False
  """
  plain = "".join(c for c in str(replica)[:24] if c.isalnum() or c in "._-")
  return f"{plain}-{secrets.token_hex(8)}"
