"""Serves a run: its page, and its metrics for Prometheus, both read-only."""

from __future__ import annotations

import contextlib
import hmac
import http.server
import importlib.resources
import json
import logging
import secrets
import socket
import socketserver
import sys
import threading
import time
import urllib.parse
from typing import Any

from optax_dist.cli import errors
from optax_dist.cli.runs.view import View
from optax_dist.coordinator.metrics import prometheus
from optax_dist.coordinator.transport import addresses

_log = logging.getLogger("optax_dist.coordinator")

# Clients at once, and seconds after which the oldest has to make way for another one:
# an answer takes milliseconds.
_CLIENTS, _SLOW = 32, 2.0

# The page needs only itself and its data.
_HEADERS = {
  "Cache-Control": "no-store",
  "Content-Security-Policy": (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline';"
    " connect-src 'self'; img-src data:; frame-ancestors 'none'"
  ),
  "Referrer-Policy": "no-referrer",
  "X-Content-Type-Options": "nosniff",
}


class Server:
  """Serves a run until it is closed.

  Attributes:
    url: URL of the page, with the token if it needs one.
    metrics_url: URL of the metrics.
  """

  def __init__(
    self,
    shown: View,
    bind: str = "127.0.0.1",
    port: int = 0,
  ):
    """Starts to listen, and serves from a thread.

    Args:
      shown: the run; its `lock` is held while it is read.
      bind: address to listen on. Beyond loopback the page needs a token, and
        everyone can read the metrics.
      port: port to listen on; 0 for any free one.

    Raises:
      errors.CommandError: it can't listen on the address.
    """
    self._view = shown
    is_here = addresses.is_loopback(bind)
    self.token = "" if is_here else secrets.token_urlsafe(16)
    try:
      self._listener = _Listener(self, bind, port)
    except OSError as error:
      raise errors.CommandError(
        f"can't listen at {bind} port {port}: {error.strerror}"
      ) from error
    self._thread = threading.Thread(
      target=self._listener.serve_forever,
      args=(0.1,),  # Seconds until it notices `close`.
      name="optax-dist-http",
      daemon=True,
    )
    self._thread.start()
    at = addresses.Endpoint(bind, self._listener.server_port)
    self.url = f"http://{at}/"
    self.metrics_url = f"{self.url}metrics"
    if self.token:
      self.url += f"?token={self.token}"

  def close(self) -> None:
    """Stops listening."""
    self._listener.shutdown()
    self._listener.server_close()
    self._thread.join()

  def state(self) -> dict[str, Any]:
    """The page's current data."""
    with self._view.lock:
      self._view.read()
      return self._view.state()

  def metrics(self) -> str:
    """The current metrics, in Prometheus' text format."""
    with self._view.lock:
      self._view.read()
      numbers = self._view.numbers
      if numbers.is_empty:
        # A host without the journal must not report zeros, which would pass for the
        # run's numbers.
        return f"# {self._view.unwritten}\n"
      return prometheus.text(numbers.metrics())

  def answer(self, url: str, host: str) -> tuple[int, str, str]:
    """The answer to a request.

    Args:
      url: its path and query.
      host: the host that it names.

    Returns:
      The HTTP status, the type of the content, and the content.
    """
    where = _split(url)
    is_metrics = where.path == "/metrics"
    token = urllib.parse.parse_qs(where.query).get("token", [""])[0]
    # Scrapers know no token.
    if not (is_metrics and self.token) and not self._may_see(token, host):
      return 403, "text/plain", "This page needs its token.\n"
    if is_metrics:
      return 200, "text/plain; version=0.0.4", self.metrics()
    if where.path == "/":
      files = importlib.resources.files("optax_dist.cli.runs.web")
      return 200, "text/html", files.joinpath("page.html").read_text("utf-8")
    if where.path == "/state.json":
      state = json.dumps(self.state(), allow_nan=False)
      return 200, "application/json", state
    return 404, "text/plain", "There are only / and /metrics.\n"

  def _may_see(self, token: str, host: str) -> bool:
    if self.token:
      return hmac.compare_digest(token.encode(), self.token.encode())
    # Prevents DNS rebinding: another name may resolve to this address.
    name = _split(f"//{host}").hostname
    return name is not None and addresses.is_loopback(name)


class _Listener(http.server.ThreadingHTTPServer):
  """Each client has a thread, and only so many have one."""

  def __init__(self, served: Server, bind: str, port: int):
    if ":" in bind:
      self.address_family = socket.AF_INET6
    self.served = served
    # When each connection began; the oldest is the first.
    self._since: dict[socket.socket, float] = {}
    super().__init__((bind, port), _Handler)

  def handle_error(self, request: Any, client_address: Any) -> None:
    """Logs errors, except of a client that went away before its answer."""
    if not isinstance(sys.exception(), ConnectionError):
      _log.warning("A request has failed.", exc_info=True)

  def verify_request(self, request: Any, client_address: Any) -> bool:
    """Takes one more client, if need be in the place of a slow one."""
    if len(self._since) >= _CLIENTS:
      oldest, since = next(iter(self._since.items()))
      if time.monotonic() - since <= _SLOW:
        return False
      self._since.pop(oldest, None)
      with contextlib.suppress(OSError):
        oldest.shutdown(socket.SHUT_RDWR)  # Ends the connection's thread.
    self._since[request] = time.monotonic()
    return True

  def shutdown_request(self, request: Any) -> None:
    """Called by the thread of the request, in the end."""
    self._since.pop(request, None)
    super().shutdown_request(request)

  def server_bind(self) -> None:
    # Not `HTTPServer.server_bind`, which looks up the host's name.
    socketserver.TCPServer.server_bind(self)
    self.server_port = self.server_address[1]


class _Handler(http.server.BaseHTTPRequestHandler):
  server: _Listener
  server_version, sys_version = "optax-dist", ""

  def do_GET(self) -> None:
    host = self.headers.get("Host", "")
    status, kind, text = self.server.served.answer(self.path, host)
    body = text.encode()
    self.send_response(status)
    self.send_header("Content-Type", f"{kind}; charset=utf-8")
    self.send_header("Content-Length", str(len(body)))
    for name, value in _HEADERS.items():
      self.send_header(name, value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)

  do_HEAD = do_GET

  def log_message(self, format: str, *args: Any) -> None:
    """Requests are no news."""


def _split(url: str) -> urllib.parse.SplitResult:
  """The parts of a URL; of one that is none, no parts."""
  try:
    return urllib.parse.urlsplit(url)
  except ValueError:
    return urllib.parse.urlsplit("")
