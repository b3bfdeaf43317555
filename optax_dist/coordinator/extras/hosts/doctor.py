"""Checks the hosts of a job before the job; run it on each of them.

It connects as the launchers will: host 0 starts the store, the hosts leave
notices in it, and each connects to all others.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import platform
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from optax_dist.coordinator.extras.hosts import board, nodes
from optax_dist.coordinator.extras.hosts.notices import Checkup, Notice
from optax_dist.coordinator.extras.hosts.peers import Patience, Peers
from optax_dist.coordinator.extras.hosts.placement import (
  own_address,
  start_store,
  unreached,
)
from optax_dist.coordinator.protocol import codec
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
    notice: Notice,
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
      notice: as launchers write it, with their settings.
      secret: the secret of the job.
      store: the URL of a store that is not of this job.
      run: a name that keeps this apart in such a store.
      timeout: seconds to wait for the other hosts.
      tell: called with each finding as soon as it is known.
    """
    self._node, self._tell, self._timeout = node, tell, timeout
    self._secret, self._store, self._run = secret, store, run
    packages = ("optax-dist", "jax")
    versions = [(name, importlib.metadata.version(name)) for name in packages]
    versions.append(("Python", platform.python_version()))
    self._notice = codec.replace(notice, settings=(*notice.settings, *versions))
    self._good = True
    # The latest checkup of each other host on which a doctor runs.
    self._found: dict[int, Checkup] = {}

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
          made = start_store(self._node, self._secret.encode())
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
    peers = Peers(
      node.rank,
      self._notice,
      range(node.count),
      Patience(),
      time.monotonic(),
    )
    secret = self._secret.encode()
    mine = board.Board(place, secret, self._run, node.rank, peers.hosts)
    stack.callback(mine.close, _FAREWELL)
    others = set(peers.hosts) - {node.rank}
    done = False
    end = time.monotonic() + self._timeout
    publish_at = 0.0
    while time.monotonic() < end:
      for host, notice in mine.poll(0.05):
        wrong = peers.update(host, notice, time.monotonic())
        if wrong:
          self._find(False, wrong)
          return
        if (
          notice
          and host in others
          and not peers.is_silent(host, time.monotonic())
        ):
          self._take(host, notice.checkup)
      # That may take long: what is read meanwhile would tell an old time.
      if not done and self._found.keys() == others:
        self._try_all(peers)
        done = True
      now = time.monotonic()
      if peers.may_write(now) and now >= publish_at:
        publish_at = now + _BEAT
        checkup = Checkup(address, time.time(), done)
        mine.publish(codec.replace(self._notice, checkup=checkup))
        if done and all(found.done for found in self._found.values()):
          return
    if not mine.reached:
      trouble = mine.trouble or "nothing came back"
      self._find(False, unreached(node, self._store is not None, trouble))
      return
    if not done:
      self._try_all(peers)
    for host in sorted(others - self._found.keys()):
      self._find(
        False,
        f"host {host} has not come in {self._timeout:g} s: run the same command"
        f" there, with --node-rank {host}.",
      )

  def _take(self, host: int, checkup: Checkup | None) -> None:
    """Takes a checkup of another host; the first one tells its clock."""
    if checkup is None:
      return
    if host not in self._found:
      ahead = checkup.clock - time.time()
      low, high = _SKEW
      good = -high <= ahead <= -low
      words = "agrees with this one's"
      if not good:
        words = (
          f"is {abs(ahead):.0f} s {'ahead of' if ahead > 0 else 'behind'} this"
          " one's, so that logs can't be compared: set both by NTP."
        )
      self._find(good, f"host {host}: its clock {words}")
    self._found[host] = checkup

  def _try_all(self, peers: Peers) -> None:
    """Connects to the other hosts."""
    for host, checkup in sorted(self._found.items()):
      notice = peers.notice(host)
      assert notice is not None
      endpoint = addresses.parse(checkup.address)[-1]
      where = f"host {host} ({notice.process}) at {endpoint}"
      try:
        to = endpoint.host, endpoint.port
        socket.create_connection(to, _CONNECT).close()
      except OSError as error:
        self._find(
          False,
          f"{where} can't be reached from here: {error}. Replicas connect to"
          f" each other at the ports {_ports()}: let the firewall pass these, or"
          " choose another network by --local-addr there.",
        )
      else:
        self._find(
          True, f"{where} is reached, has the same settings and versions"
        )


def _ports() -> str:
  return f"{sockets.DEFAULT_PORTS[0]} to {sockets.DEFAULT_PORTS[-1]}"
