"""Serves the page of a run: read-only, and by default on loopback only."""

from __future__ import annotations

import hmac
import http.server
import importlib.resources
import ipaddress
import json
import secrets
import socket
import sys
import threading
import urllib.parse
from typing import Any

from optax_dist.cli import errors
from optax_dist.cli.runs.web.view import View
from optax_dist.coordinator.journal_tail import Tail

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
  """A page that follows a journal until it is closed.

  Args:
    tail: tail of the journal.
    bind: address to listen on. Beyond loopback the page needs a token.
    port: port to listen on; 0 for any free one.

  Attributes:
    url: URL of the page, with the token if it needs one.
  """

  def __init__(self, tail: Tail, bind: str = "127.0.0.1", port: int = 0):
    """Starts to listen, and serves from a thread.

    Raises:
      errors.CommandError: it can't listen on the address.
    """
    self._tail, self._view = tail, View()
    self._lock = threading.Lock()
    self.loopback = _is_loopback(bind)
    self.token = "" if self.loopback else secrets.token_urlsafe(16)
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    handler = type("_OfThisServer", (_Handler,), {"page": self})
    kind = type(
      "_OfThisFamily",
      (_Listener,),
      {"address_family": family},
    )
    try:
      self._server = kind((bind, port), handler)
    except OSError as error:
      raise errors.CommandError(
        f"can't listen on {bind} port {port}: {error.strerror}"
      ) from error
    shown = f"[{bind}]" if ":" in bind else bind
    self.url = f"http://{shown}:{self._server.server_address[1]}/"
    if self.token:
      self.url += f"?token={self.token}"
    self._thread = threading.Thread(
      target=self._server.serve_forever, kwargs={"poll_interval": 0.1}
    )
    self._thread.start()

  def state(self) -> dict[str, Any]:
    """The page's current data."""
    with self._lock:
      self._view.update(self._tail.read(), self._tail.age)
      return self._view.state()

  def close(self) -> None:
    """Stops listening."""
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()


class _Listener(http.server.ThreadingHTTPServer):
  daemon_threads = True

  def handle_error(self, request: Any, client_address: Any) -> None:
    """Tells errors, except that a page was closed before it had its answer."""
    if not isinstance(sys.exception(), ConnectionError):
      super().handle_error(request, client_address)


class _Handler(http.server.BaseHTTPRequestHandler):
  page: Server
  server_version, sys_version = "optax-dist", ""
  timeout = 10.0

  def do_GET(self) -> None:
    where = _split(self.path)
    query = urllib.parse.parse_qs(where.query)
    if not self._may_see(query.get("token", [""])[0]):
      self._send(403, "text/plain", b"This page needs its token.\n")
    elif where.path == "/":
      files = importlib.resources.files("optax_dist.cli.runs.web")
      self._send(200, "text/html", files.joinpath("page.html").read_bytes())
    elif where.path == "/state.json":
      state = json.dumps(self.page.state(), allow_nan=False)
      self._send(200, "application/json", state.encode())
    else:
      self._send(404, "text/plain", b"There is only one page: /\n")

  do_HEAD = do_GET

  def _may_see(self, token: str) -> bool:
    if self.page.token:
      return hmac.compare_digest(token.encode(), self.page.token.encode())
    # Prevents DNS rebinding: another name may resolve to this address.
    host = _split(f"//{self.headers.get('Host', '')}").hostname
    return host is not None and _is_loopback(host)

  def _send(self, status: int, kind: str, body: bytes) -> None:
    self.send_response(status)
    self.send_header("Content-Type", f"{kind}; charset=utf-8")
    self.send_header("Content-Length", str(len(body)))
    for name, value in _HEADERS.items():
      self.send_header(name, value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(body)

  def log_message(self, format: str, *args: Any) -> None:
    """Logs nothing: a page that polls each second would fill the terminal."""


def _split(url: str) -> urllib.parse.SplitResult:
  """The parts of a URL; of one that is none, no parts."""
  try:
    return urllib.parse.urlsplit(url)
  except ValueError:
    return urllib.parse.urlsplit("")


def _is_loopback(host: str) -> bool:
  if host == "localhost":
    return True
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return False
