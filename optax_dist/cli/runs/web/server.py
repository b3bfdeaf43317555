"""Serves the page of a run: read-only, and by default on loopback only."""

from __future__ import annotations

import hmac
import importlib.resources
import ipaddress
import json
import secrets
import threading
import urllib.parse
from typing import Any

from optax_dist.cli import errors
from optax_dist.cli.runs import own_metrics
from optax_dist.cli.runs.web.view import View
from optax_dist.coordinator.journal_tail import Tail
from optax_dist.coordinator.metrics import http_server

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
    self.token = "" if _is_loopback(bind) else secrets.token_urlsafe(16)
    try:
      self._server = http_server.HttpServer(self._answer, bind, port)
    except OSError as error:
      raise errors.CommandError(f"{error.strerror}") from error
    self.url = f"{self._server.url}/"
    if self.token:
      self.url += f"?token={self.token}"

  def state(self) -> dict[str, Any]:
    """The page's current data."""
    with self._lock:
      self._view.update(self._tail.read(), self._tail.age)
      self._view.reported = own_metrics.latest(self._tail.path)
      return self._view.state()

  def close(self) -> None:
    """Stops listening."""
    self._server.close()

  def _answer(self, path: str, host: str) -> http_server.Page:
    where = _split(path)
    query = urllib.parse.parse_qs(where.query)
    if not self._may_see(query.get("token", [""])[0], host):
      return _page(b"This page needs its token.\n", "text/plain", 403)
    if where.path == "/":
      files = importlib.resources.files("optax_dist.cli.runs.web")
      return _page(files.joinpath("page.html").read_bytes(), "text/html")
    if where.path == "/state.json":
      state = json.dumps(self.state(), allow_nan=False)
      return _page(state.encode(), "application/json")
    return _page(b"There is only one page: /\n", "text/plain", 404)

  def _may_see(self, token: str, host: str) -> bool:
    if self.token:
      return hmac.compare_digest(token.encode(), self.token.encode())
    # Prevents DNS rebinding: another name may resolve to this address.
    name = _split(f"//{host}").hostname
    return name is not None and _is_loopback(name)


def _page(body: bytes, kind: str, status: int = 200) -> http_server.Page:
  return http_server.Page(body, f"{kind}; charset=utf-8", status, _HEADERS)


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
