"""Checks the hosts of a job before the job; run it on each of them.

It connects as the launchers will: host 0 starts the store, the hosts leave
notices in it, and each connects to all others.
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
from collections.abc import Callable, Mapping
from typing import NamedTuple

from optax_dist.coordinator.extras.hosts import agreement, board, nodes, notices
from optax_dist.coordinator.extras.hosts.placement import own_address, unreached
from optax_dist.coordinator.launch.supervisor import GiveUpRun
from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.store import process as store_process
from optax_dist.coordinator.store import urls
from optax_dist.coordinator.transport import addresses, sockets

_BEAT = 0.5  # Seconds between notices.
_CONNECT = 3.0  # Seconds to connect to another host.
# A notice is read up to a second after it was written.
_SKEW = (-2.0, 3.0)
_FAREWELL = 3.0


class Finding(NamedTuple):
  """The result of a check.

  Attributes:
    good: whether nothing has to be done.
    line: what was found; with a remedy if it is not good.
  """

  good: bool
  line: str


class Doctor:
  """One host's checks; `run` does them all."""

  def __init__(
    self,
    node: nodes.Node,
    settings: Mapping[str, str],
    *,
    secret: str,
    store: str | None,
    run: str,
    timeout: float,
    tell: Callable[[Finding], None],
  ):
    """Sets what to check.

    Args:
      node: this host.
      settings: the settings that must be the same on all hosts, by flag.
      secret: the secret of the job.
      store: the URL of a store that is not of this job.
      run: a name that keeps this apart in such a store.
      timeout: seconds to wait for the other hosts.
      tell: called with each finding as soon as it is known.
    """
    self._node, self._tell, self._timeout = node, tell, timeout
    self._secret, self._store, self._run = secret, store, run
    self._settings = dict(settings) | {
      "optax-dist": importlib.metadata.version("optax-dist"),
      "jax": importlib.metadata.version("jax"),
      "Python": platform.python_version(),
    }
    self._good = True
    # The latest notice of each other host, if it is of a doctor that runs.
    self._seen: dict[int, notices.Notice] = {}
    self._first: dict[int, notices.Notice | None] = {}

  def run(self) -> bool:
    """Checks everything; returns whether all was good."""
    url = self._store or f"tcp://{self._node.address}"
    place = urls.parse(url)
    if not self._check_name(place.host):
      return False
    with contextlib.ExitStack() as stack:
      # The findings say what the transport would log.
      logger = logging.getLogger("optax_dist")
      stack.callback(logger.setLevel, logger.level)
      logger.setLevel(logging.ERROR)
      if self._store is None and self._node.rank == 0:
        try:
          bind, port = self._node.listens_at()
          made = store_process.start(
            self._secret.encode(), bind=bind, port=port, advertise=place.host
          )
        except (RuntimeError, TimeoutError) as error:
          self._find(
            False,
            f"{error} Is a job running on this host? Choose another port.",
          )
          return False
        stack.callback(made.stop)
        stack.callback(made.drain, _FAREWELL)
      self._meet(place, stack)
    return self._good

  def _find(self, good: bool, line: str) -> None:
    self._good &= good
    self._tell(Finding(good, line))

  def _check_name(self, host: str) -> bool:
    try:
      found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
      self._find(
        False,
        f"the store's host name {host!r} can't be resolved here: {error}. Give"
        " an IP address, or enter the name in DNS or /etc/hosts.",
      )
      return False
    ips = dict.fromkeys(str(one[4][0]) for one in found)
    self._find(True, f"the store's host is {host} ({', '.join(ips)})")
    return True

  def _meet(self, place: urls.Place, stack: contextlib.ExitStack) -> None:
    """Exchanges notices with the other hosts until all are done, or too late."""
    node = self._node
    try:
      family, ip = own_address(node.local_addr, place.host)
    except ValueError as error:
      self._find(False, f"{error}")
      return
    listener = stack.enter_context(socket.socket(family))
    for port in sockets.DEFAULT_PORTS:
      with contextlib.suppress(OSError):
        listener.bind((ip, port))
        listener.listen()
        break
    else:
      self._find(False, f"no port of {_ports()} is free at {ip}.")
      return
    address = str(addresses.Endpoint(ip, port))
    self._find(True, f"others shall reach this host at {address}")
    agreed = agreement.Agreement(
      node.rank,
      secrets.token_hex(8),
      (),
      agreement.Patience(),
      time.monotonic(),
      range(node.count),
      self._settings.items(),
      f"{socket.gethostname()}, process {os.getpid()}",
    )
    secret = self._secret.encode()
    mine = board.Board(place, secret, self._run, node.rank, agreed.hosts)
    stack.callback(mine.close, _FAREWELL)
    others = set(agreed.hosts) - {node.rank}
    done = False
    end = time.monotonic() + self._timeout
    publish_at = 0.0
    while time.monotonic() < end:
      for host, notice in mine.poll(0.05):
        for effect in agreed.step(
          agreement.Heard(host, notice), time.monotonic()
        ):
          if isinstance(effect, GiveUpRun):
            self._find(False, effect.reason)
            return
        self._hear(host, notice)
      # That may take long: what is read meanwhile would tell an old time.
      if not done and self._seen.keys() == others:
        self._try_all()
        done = True
      if agreed.writes and time.monotonic() >= publish_at:
        publish_at = time.monotonic() + _BEAT
        checkup = notices.Checkup(address, time.time(), done)
        mine.publish(codec.replace(agreed.notice, checkup=checkup))
        if done and all(_is_done(self._seen[host]) for host in others):
          return
    if not mine.reached:
      trouble = mine.trouble or "nothing came back"
      self._find(False, unreached(node, self._store is not None, trouble))
      return
    if not done:
      self._try_all()
    for host in sorted(others - self._seen.keys()):
      self._find(
        False,
        f"host {host} has not come in {self._timeout:g} s: run the same command"
        f" there, with --node-rank {host}.",
      )

  def _hear(self, host: int, notice: notices.Notice | None) -> None:
    """Takes a notice of another host, unless it may be from an earlier time."""
    if host == self._node.rank:
      return
    before = self._first.setdefault(host, notice)
    if notice is None or notice == before or notice.checkup is None:
      return
    if host not in self._seen:
      ahead = notice.checkup.clock - time.time()
      low, high = _SKEW
      good = -high <= ahead <= -low
      words = "agrees with this one's"
      if not good:
        words = (
          f"is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this"
          " one's, so that logs can't be compared: set both by NTP."
        )
      self._find(good, f"host {host}: its clock {words}")
    self._seen[host] = notice

  def _try_all(self) -> None:
    for host in sorted(self._seen):
      self._try(host, self._seen[host])

  def _try(self, host: int, notice: notices.Notice) -> None:
    assert notice.checkup is not None
    endpoint = addresses.parse(notice.checkup.address)[-1]
    where = f"host {host} ({notice.process}) at {endpoint}"
    try:
      socket.create_connection((endpoint.host, endpoint.port), _CONNECT).close()
    except OSError as error:
      self._find(
        False,
        f"{where} can't be reached from here: {error}. Replicas connect to each"
        f" other at the ports {_ports()}: let the firewall pass these, or choose"
        " another network by --local-addr there.",
      )
      return
    self._find(True, f"{where} is reached, has the same settings and versions")


def _ports() -> str:
  return f"{sockets.DEFAULT_PORTS[0]} to {sockets.DEFAULT_PORTS[-1]}"


def _is_done(notice: notices.Notice) -> bool:
  return notice.checkup is not None and notice.checkup.done
