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
from collections.abc import Iterator
from typing import NamedTuple

from optax_dist.coordinator.extras.hosts import board, nodes
from optax_dist.coordinator.extras.hosts.notices import Checkup, Notice
from optax_dist.coordinator.extras.hosts.peers import Peers
from optax_dist.coordinator.extras.hosts.placement import (
  start_store,
  unreached,
)
from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.store import urls
from optax_dist.coordinator.transport import addresses, listening, sockets

_CONNECT = 3.0  # Seconds to connect to another host.
# A notice is read up to a second after it was written.
_SKEW = (-2.0, 3.0)
_FAREWELL = 3.0
_PORTS = f"{sockets.DEFAULT_PORTS[0]} to {sockets.DEFAULT_PORTS[-1]}"


class Finding(NamedTuple):
  """The result of a check.

  Attributes:
    good: whether nothing has to be done.
    line: what was found; with a remedy if it is not good.
  """

  good: bool
  line: str


def check(
  node: nodes.Node,
  notice: Notice,
  *,
  secret: str,
  store: str | None,
  run: str,
  timeout: float,
) -> Iterator[Finding]:
  """Checks this host with all others.

  Args:
    node: this host.
    notice: as launchers write it, with their settings.
    secret: the secret of the job.
    store: the URL of a store that is not of this job.
    run: a name that keeps this apart in such a store.
    timeout: seconds to wait for the other hosts.

  Yields:
    Each finding as soon as it is known.
  """
  place = urls.parse(store or f"tcp://{node.address}")
  with contextlib.ExitStack() as stack:
    # The findings say what the transport would log.
    logger = logging.getLogger("optax_dist")
    stack.callback(logger.setLevel, logger.level)
    logger.setLevel(logging.ERROR)
    try:
      address = _listen(node, place.host, stack)
      if store is None and node.rank == 0:
        made = start_store(node, secret.encode())
        stack.callback(made.stop)
        stack.callback(made.drain, _FAREWELL)
    except ValueError as error:
      yield Finding(False, f"{error}")
      return
    except (RuntimeError, TimeoutError) as error:
      ask = "Is a job running on this host? Choose another port."
      yield Finding(False, f"{error} {ask}")
      return
    yield Finding(True, f"other hosts are to reach this one at {address}")
    mine = board.Board(
      place, secret.encode(), run, node.rank, range(node.count)
    )
    stack.callback(mine.close, _FAREWELL)
    yield from _meet(node, notice, address, mine, timeout)
    if not mine.reached:
      trouble = mine.trouble or "nothing came back"
      yield Finding(False, unreached(node, store is not None, trouble))


def _listen(node: nodes.Node, host: str, stack: contextlib.ExitStack) -> str:
  """Listens as a replica does; returns the address for other hosts."""
  bind = node.local_addr
  if bind is None and addresses.own(None, host) is None:
    bind = host  # A replica has no need of a port then, and a host has.
  try:
    made = listening.listen(bind, sockets.DEFAULT_PORTS, None, host, True)
  except OSError as error:
    raise RuntimeError(str(error)) from None
  for one in made.sockets:
    stack.callback(one.close)
  return made.address.partition(",")[0]


def _meet(
  node: nodes.Node,
  notice: Notice,
  address: str,
  mine: board.Board,
  timeout: float,
) -> Iterator[Finding]:
  """Exchanges notices with the other hosts until all are done, or too late."""
  versions = [
    *(
      (name, importlib.metadata.version(name)) for name in ("optax-dist", "jax")
    ),
    ("Python", platform.python_version()),
  ]
  notice = codec.replace(notice, settings=(*notice.settings, *versions))
  now = time.monotonic()
  peers = Peers(node.rank, notice, range(node.count), now)
  others = set(peers.hosts) - {node.rank}
  # The latest checkup of each other host on which a doctor runs.
  found: dict[int, Checkup] = {}
  done, end = False, now + timeout
  while time.monotonic() < end:
    for host, read in mine.poll(0.05):
      now = time.monotonic()
      wrong = peers.update(host, read, now)
      if wrong:
        yield Finding(False, wrong)
        return
      checkup = read and read.checkup
      if checkup and host in others and not peers.is_silent(host, now):
        if host not in found:
          yield _compare_clocks(host, checkup)
        found[host] = checkup
    # That may take long: what is read meanwhile would tell an old time.
    if not done and found.keys() == others:
      yield from _try_all(peers, found)
      done = True
    if peers.may_write(time.monotonic()):
      own = Checkup(address, time.time(), done)
      mine.publish(codec.replace(notice, checkup=own))
      if done and all(checkup.done for checkup in found.values()):
        return
  if not mine.reached:
    return
  if not done:
    yield from _try_all(peers, found)
  for host in sorted(others - found.keys()):
    yield Finding(
      False,
      f"host {host} has not connected in {timeout:g} s: run the same command"
      f" there, with --node-rank {host}.",
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


def _try_all(peers: Peers, found: dict[int, Checkup]) -> Iterator[Finding]:
  """Connects to the other hosts."""
  for host, checkup in sorted(found.items()):
    notice = peers.notice(host)
    assert notice is not None
    endpoint = addresses.parse(checkup.address)[-1]
    where = f"host {host} ({notice.process}) at {endpoint}"
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
