"""How many connections a port of this host has: whether anybody is there."""

from __future__ import annotations

import contextlib
import os
import pathlib

_ESTABLISHED = "01"
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


def count(port: int, except_own: bool = False) -> int | None:
  """Connections to this port; None where it can't be told.

  Args:
    port: of this host.
    except_own: whether to leave out those that this process has to itself.

  Example:
    >>> import socket
    >>> with socket.create_server(("127.0.0.1", 0)) as server:
    ...   port = server.getsockname()[1]
    ...   before = count(port)
    ...   with socket.create_connection(("127.0.0.1", port)):
    ...     print(before, count(port))
    0 1
  """
  rows, known = [], False
  for table in _TABLES:
    try:
      rows += pathlib.Path(table).read_text().splitlines()[1:]
      known = True
    except OSError:
      continue
  ends = [row.split() for row in rows]
  ports = [
    (int(end[1][-4:], 16), int(end[2][-4:], 16), end[9])
    for end in ends
    if end[3] == _ESTABLISHED
  ]
  # A process may be connected to itself, and is nobody else.
  own = _own_sockets() if except_own else set()
  mine = {
    local for local, peer, inode in ports if peer == port and inode in own
  }
  found = sum(local == port and peer not in mine for local, peer, _ in ports)
  return found if known else None


def _own_sockets() -> set[str]:
  found = set()
  for file in os.listdir("/proc/self/fd"):
    with contextlib.suppress(OSError):
      target = os.readlink(f"/proc/self/fd/{file}")
      if target.startswith("socket:["):
        found.add(target[len("socket:[") : -1])
  return found
