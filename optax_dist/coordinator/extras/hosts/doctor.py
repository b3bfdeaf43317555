"""Checks the hosts of a job before the job; run it on each of them.

The hosts connect as the replicas will: host 0 listens in place of the coordinator, the
other hosts report to it, and each host then connects to all others.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import platform
import secrets
import socket
import time
from collections.abc import Iterator
from typing import NamedTuple

import optax_dist
from optax_dist.coordinator.launch.environment import Environment
from optax_dist.coordinator.launch.placement import Placement
from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.server import places
from optax_dist.coordinator.server.process import Settings
from optax_dist.coordinator.transport import (
  addresses,
  listening,
  sockets,
  tls,
)
from optax_dist.coordinator.transport import interface as transports

_CONNECT = 3.0  # Seconds to connect to another host.
_EXCHANGE_SECONDS = 0.2  # Between two exchanges, and before connecting again.
# A checkup is read up to a second after it was written.
_SKEW = (-2.0, 3.0)
_FAREWELL = 3.0
_PORTS = f"{sockets.DEFAULT_PORTS[0]} to {sockets.DEFAULT_PORTS[-1]}"
# The name of host 0 for the others.
_MEETING = "doctor"


class Checkup(codec.Struct):
  """A host's report to the other hosts.

  Attributes:
    host: its index.
    process: where the command runs, human-readable.
    settings: what must be the same on all hosts, by flag or program.
    address: where it listens, for others to try to connect.
    clock: its wall clock, in seconds since 1970.
    done: whether it has tried to connect to all others.
  """

  host: int
  process: str
  settings: tuple[tuple[str, str], ...]
  address: str
  clock: float = 0.0
  done: bool = False


# A host sends its own report, and host 0 sends those of all hosts.
_CODEC: codec.Codec[tuple[Checkup, ...]] = codec.Codec(tuple[Checkup, ...])


class Finding(NamedTuple):
  """The result of a check.

  Attributes:
    good: whether nothing has to be done.
    line: the result as text, with a remedy if it is not good.
  """

  good: bool
  line: str


def settings(
  placement: Placement, environment: Environment
) -> tuple[tuple[str, str], ...]:
  """What must be equal on all hosts, by flag or program.

  Args:
    placement: what runs where.
    environment: the environment of all replicas.
  """
  flags = {
    "--nodes": placement.hosts,
    "--replicas": placement.replicas,
    "--processes-per-replica": placement.processes,
    "--replicas-to-aggregate": environment.replicas_to_aggregate,
    "--min-replicas": environment.min_replicas,
    "optax-dist": optax_dist.__version__,
    "jax": importlib.metadata.version("jax"),
    "Python": platform.python_version(),
  }
  return tuple((flag, str(value)) for flag, value in flags.items())


def check_etcd(url: str) -> Finding:
  """Asks the etcd servers of a job for something.

  Args:
    url: a valid URL of the run's keys.
  """
  client, where = places.load("client"), places.load("keys").parse(url)
  try:
    with client.Client(where) as asks:
      asks.get(where.holder_key, _CONNECT)
  except (client.NoAnswer, client.Rejected, ValueError) as error:
    return Finding(False, f"{where} can't be used from here: {error}")
  return Finding(True, f"{where} answers")


def check(
  placement: Placement,
  equal: tuple[tuple[str, str], ...],
  *,
  secret: bytes,
  certificates: tls.Certificates | None = None,
  timeout: float,
) -> Iterator[Finding]:
  """Checks this host with all others.

  Args:
    placement: what runs where.
    equal: see `settings`.
    secret: the secret of the job.
    certificates: the files of this host; None for no encryption.
    timeout: seconds to wait for the other hosts.

  Yields:
    Each finding as soon as it is known.
  """
  assert placement.address is not None
  way = addresses.endpoint(placement.address)
  with contextlib.ExitStack() as stack:
    # The findings say what the transport would log.
    logger = logging.getLogger("optax_dist")
    stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.ERROR)
    try:
      address = _listen(placement, way.host, stack)
      if certificates is not None:
        tls.check(certificates)
      meeting = stack.enter_context(_Meeting(placement, secret, certificates))
    except ValueError as error:
      yield Finding(False, f"{error}")
      return
    except OSError as error:
      ask = "Is a job running on this host? Choose another port."
      yield Finding(False, f"{error} {ask}")
      return
    if certificates is not None:
      yield Finding(True, f"the certificate in {certificates.certificate} fits")
    yield Finding(True, f"other hosts are to reach this one at {address}")
    process = f"{socket.gethostname()}, process {os.getpid()}"
    own = Checkup(placement.rank, process, equal, address)
    yield from _meet(placement, own, meeting, timeout)
    if not meeting.reached:
      yield Finding(
        False,
        f"Host 0 does not answer at {placement.address}:"
        f" {meeting.trouble or 'nothing came back'}. It listens there once the same"
        " command runs on it (--node-rank 0); the secret must be the same there, and"
        " the authority of certificates, and a firewall must let the port through.",
      )


def _listen(
  placement: Placement, host: str, stack: contextlib.ExitStack
) -> str:
  """Listens as a replica does; returns the address for other hosts."""
  bind = placement.local_addr
  if bind is None and addresses.own(None, host) is None:
    bind = host  # A replica has no need of a port then, and a host has.
  made = listening.listen(bind, sockets.DEFAULT_PORTS, None, host, True)
  for socket_ in made.sockets:
    stack.callback(socket_.close)
  return made.address.partition(",")[0]


class _Meeting:
  """Where hosts hear of each other, at the address of the coordinator.

  Attributes:
    reached: whether this host has ever heard of others through it.
    trouble: why it can't be reached; "" while it can.
    refused: whether that won't get better by trying.
  """

  def __init__(
    self,
    placement: Placement,
    secret: bytes,
    certificates: tls.Certificates | None = None,
  ):
    self._placement, self._is_first = placement, placement.rank == 0
    self.reached, self.trouble = self._is_first, ""
    self.refused = False
    self._known: dict[int, Checkup] = {}
    if self._is_first:
      assert placement.address is not None
      at = Settings.at(placement.address)
      self._transport = sockets.Transport(
        _MEETING,
        secret=secret,
        bind=at.bind,
        ports=[at.port],
        advertise=at.advertise,
        certificates=certificates,
      )
    else:
      name = f"{_MEETING}-{placement.rank}-{secrets.token_hex(4)}"
      self._transport = sockets.Transport(
        name, secret=secret, certificates=certificates
      )
    self._again_at, self._connected = 0.0, False
    self._own: Checkup | None = None

  def __enter__(self) -> _Meeting:
    return self

  def __exit__(self, *error: object) -> None:
    if self._own is not None:
      self._tell(self._own)  # Its last report: this host may be done by now.
    self._transport.flush()
    end = time.monotonic() + _FAREWELL
    # The other hosts have yet to read that all are done.
    while self._is_first and self._transport.peers() and time.monotonic() < end:
      self._transport.poll(_EXCHANGE_SECONDS / 4)
    self._transport.close()

  def exchange(self, own: Checkup) -> dict[int, Checkup]:
    """Sends this host's report; returns the known reports of all hosts."""
    self._own = own
    if self._is_first:
      self._known[0] = own
    if time.monotonic() >= self._again_at:
      self._again_at = time.monotonic() + _EXCHANGE_SECONDS
      self._tell(own)
    for event in self._transport.poll(_EXCHANGE_SECONDS / 4):
      match event:
        case transports.PeerUp():
          self._connected = True
        case transports.PeerLost(_, how, reason) if not self._is_first:
          self._connected, self.trouble = False, reason
          self.refused = how == "refused"
        case transports.Message(_, payload):
          with contextlib.suppress(codec.BadMessage):
            self._note(_CODEC.decode(payload))
        case _:
          pass
    return dict(self._known)

  def _tell(self, own: Checkup) -> None:
    if self._is_first:
      known = _CODEC.encode(tuple(self._known.values()))
      for peer in self._transport.peers():
        self._transport.send(peer, [known])
      return
    if not self._connected:
      assert self._placement.address is not None
      self._transport.connect(_MEETING, self._placement.address)
    self._transport.send(_MEETING, [_CODEC.encode((own,))])

  def _note(self, checkups: tuple[Checkup, ...]) -> None:
    self.reached = True
    for checkup in checkups:
      before = self._known.get(checkup.host)
      if (
        self._is_first
        and before is not None
        and before.process != checkup.process
      ):
        continue  # The second one hears of the first, and says so.
      self._known[checkup.host] = checkup


def _meet(
  placement: Placement, own: Checkup, meeting: _Meeting, timeout: float
) -> Iterator[Finding]:
  """Exchanges checkups with the other hosts until all are done, or too late."""
  others = set(range(placement.hosts)) - {placement.rank}
  seen: dict[int, Checkup] = {}
  end = time.monotonic() + timeout
  while time.monotonic() < end and not meeting.refused:
    own = codec.replace(own, clock=time.time())
    known = meeting.exchange(own)
    wrong = _double(own, known)
    for host in sorted(others & known.keys()):
      if host not in seen:
        yield _compare_clocks(host, known[host])
        wrong = wrong or _difference(own, known[host])
      seen[host] = known[host]
    if wrong:
      yield Finding(False, wrong)
      return
    # Not in the polling loop, since it may take long: clocks that are read after it
    # would be old.
    if not own.done and seen.keys() == others:
      yield from _try_all(seen)
      own = codec.replace(own, done=True)
    elif own.done and all(checkup.done for checkup in seen.values()):
      meeting.exchange(own)
      return
  if not meeting.reached:
    return
  if not own.done:
    yield from _try_all(seen)
  for host in sorted(others - seen.keys()):
    yield Finding(
      False,
      f"host {host} has not connected in {timeout:g} s: run the same command"
      f" there, with --node-rank {host}.",
    )


def _double(own: Checkup, known: dict[int, Checkup]) -> str:
  """Another host of the same index; "" if there is none."""
  other = known.get(own.host, own)
  if other.process == own.process:
    return ""
  return (
    f"Two say that they are host {own.host}: this one ({own.process}) and another"
    f" ({other.process}). Give each host a --node-rank of its own."
  )


def _difference(own: Checkup, other: Checkup) -> str:
  """Names the settings that differ from another host's, or ""."""
  mine, theirs = dict(own.settings), dict(other.settings)
  differ = [name for name in mine if mine[name] != theirs.get(name)]
  if not differ:
    return ""
  shown = lambda values: ", ".join(
    f"{name} {values.get(name, '(none)')}" for name in differ
  )
  return (
    "The hosts of the job have different settings:"
    f" {shown(mine)} here ({own.process}), {shown(theirs)} there"
    f" ({other.process}). Start all of them with the same."
  )


def _compare_clocks(host: int, checkup: Checkup) -> Finding:
  """Compares the clock of another host, by its first checkup."""
  ahead = checkup.clock - time.time()
  low, high = _SKEW
  if -high <= ahead <= -low:
    return Finding(True, f"host {host}: its clock agrees with this one's")
  return Finding(
    False,
    f"host {host}: its clock is {abs(ahead):.0f} s"
    f" {'ahead of' if ahead > 0 else 'behind'} this one's, so that logs can't be"
    " compared: set both by NTP.",
  )


def _try_all(seen: dict[int, Checkup]) -> Iterator[Finding]:
  """Connects to the other hosts."""
  for host, checkup in sorted(seen.items()):
    endpoint = addresses.parse(checkup.address)[-1]
    where = f"host {host} ({checkup.process}) at {endpoint}"
    try:
      to = endpoint.host, endpoint.port
      socket.create_connection(to, _CONNECT).close()
    except OSError as error:
      yield Finding(
        False,
        f"{where} can't be reached from here: {error}. Replicas connect to each"
        f" other at the ports {_PORTS}: let the firewall pass these, or choose"
        " another network by --local-addr there.",
      )
    else:
      yield Finding(
        True, f"{where} is reached, has the same settings and versions"
      )
