"""Metrics in Prometheus' text format, on a port of this host."""

from __future__ import annotations

import http.server
import itertools
import logging
import os
import socket
import socketserver
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

from optax_dist.coordinator.metrics import table

_log = logging.getLogger("optax_dist.coordinator")

_CONTENT = "text/plain; version=0.0.4; charset=utf-8"


class Server:
  """Serves what `collect` returns, on each request, until it is closed.

  Attributes:
    url: the address of the metrics.
  """

  def __init__(self, collect: Callable[[], table.Values], bind: str, port: int):
    """Starts to listen.

    Args:
      collect: returns the current values; called in threads of the server.
      bind: address to listen on.
      port: the port; 0 for any free one.

    Raises:
      OSError: it can't listen on the address.
    """
    self._server = _Listener(collect, bind, port)
    self._thread = threading.Thread(
      target=self._server.serve_forever,
      args=(0.1,),  # Seconds until it notices `close`.
      name="optax-dist-metrics-port",
      daemon=True,
    )
    self._thread.start()
    _living.add(self)
    shown = f"[{bind}]" if ":" in bind else bind
    self.url = f"http://{shown}:{self._server.server_port}/metrics"

  def close(self) -> None:
    """Stops listening."""
    _living.discard(self)
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()

  def leave_to_parent(self) -> None:
    """In a forked child: the port belongs to the parent."""
    self._server.socket.close()


_living: weakref.WeakSet[Server] = weakref.WeakSet()


def _after_fork() -> None:
  for server in list(_living):
    server.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


class _Listener(http.server.ThreadingHTTPServer):
  def __init__(self, collect: Callable[[], table.Values], bind: str, port: int):
    if ":" in bind:
      self.address_family = socket.AF_INET6
    self.collect = collect
    super().__init__((bind, port), _Handler)

  def handle_error(self, request: Any, client_address: Any) -> None:
    """Logs what must not end training, such as a client that went away."""
    _log.debug("metrics were not served", exc_info=True)

  def server_bind(self) -> None:
    # Not that of `HTTPServer`, which asks for the name of the host.
    socketserver.TCPServer.server_bind(self)
    self.server_port = self.server_address[1]


class _Handler(http.server.BaseHTTPRequestHandler):
  server: _Listener
  timeout = 30  # Seconds that an idle client keeps a thread.

  def do_GET(self) -> None:
    body = text(self.server.collect()).encode()
    self.send_response(http.HTTPStatus.OK)
    self.send_header("Content-Type", _CONTENT)
    self.send_header("Content-Length", str(len(body)))
    self.end_headers()
    self.wfile.write(body)

  def log_message(self, format: str, *args: Any) -> None:
    """Requests are no news."""


def text(values: table.Values) -> str:
  """The values in Prometheus' text format.

  Example:
    >>> print(text({"steps": {(): 3}}), end="")
    # HELP optax_dist_steps_total Steps committed in this run.
    # TYPE optax_dist_steps_total counter
    optax_dist_steps_total 3.0
  """
  lines = []
  for row, found in table.rows(values):
    name = table.PREFIX + row.name + ("_total" if row.kind == "counter" else "")
    lines += [f"# HELP {name} {row.help}", f"# TYPE {name} {row.kind}"]
    for key, value in found.items():
      labels = dict(zip(row.labels, key, strict=True))
      for suffix, more, number in _samples(value):
        pairs = ",".join(
          f'{label}="{_escaped(text)}"'
          for label, text in (labels | more).items()
        )
        shown = f"{{{pairs}}}" if pairs else ""
        lines.append(f"{name}{suffix}{shown} {float(number)!r}")
  return "".join(f"{line}\n" for line in lines)


def _samples(
  value: float | table.Distribution,
) -> Iterator[tuple[str, dict[str, str], float]]:
  """Suffix of the name, labels, and number, of each line for a value."""
  if not isinstance(value, table.Distribution):
    yield "", {}, value
    return
  bounds = [*(f"{bound:g}" for bound in value.bounds), "+Inf"]
  at_most = itertools.accumulate(value.counts)
  for bound, count in zip(bounds, at_most, strict=True):
    yield "_bucket", {"le": bound}, count
  yield "_count", {}, value.count
  yield "_sum", {}, value.total


def _escaped(text: str) -> str:
  return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
