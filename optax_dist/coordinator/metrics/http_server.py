"""A server of read-only pages over HTTP, in threads of this process."""

from __future__ import annotations

import http.server
import logging
import socket
import socketserver
import sys
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

_log = logging.getLogger("optax_dist.coordinator")


class Page(NamedTuple):
  """The answer to a request.

  Attributes:
    body: its content.
    content_type: the kind of the content.
    status: the HTTP status.
    headers: further headers.
  """

  body: bytes
  content_type: str
  status: int = 200
  headers: Mapping[str, str] = {}


class HttpServer:
  """Answers GET and HEAD until it is closed.

  Attributes:
    url: its address, without a path.
  """

  def __init__(self, answer: Callable[[str, str], Page], bind: str, port: int):
    """Starts to listen.

    Args:
      answer: called with the path and the `Host` of a request, in threads of
        the server; returns the page.
      bind: address to listen on.
      port: the port; 0 for any free one.

    Raises:
      OSError: it can't listen on the address, which the message names.
    """
    try:
      self._server = _Listener(answer, bind, port)
    except OSError as error:
      words = f"can't listen at {bind} port {port}: {error.strerror}"
      raise OSError(error.errno, words) from error
    self._thread = threading.Thread(
      target=self._server.serve_forever,
      args=(0.1,),  # Seconds until it notices `close`.
      name="optax-dist-http",
      daemon=True,
    )
    self._thread.start()
    shown = f"[{bind}]" if ":" in bind else bind
    self.url = f"http://{shown}:{self._server.server_port}"

  def close(self) -> None:
    """Stops listening."""
    self._server.shutdown()
    self._server.server_close()
    self._thread.join()


class _Listener(http.server.ThreadingHTTPServer):
  def __init__(self, answer: Callable[[str, str], Page], bind: str, port: int):
    if ":" in bind:
      self.address_family = socket.AF_INET6
    self.answer = answer
    super().__init__((bind, port), _Handler)

  def handle_error(self, request: Any, client_address: Any) -> None:
    """Logs errors, except of a client that went away before its answer."""
    if not isinstance(sys.exception(), ConnectionError):
      _log.warning("A request has failed.", exc_info=True)

  def server_bind(self) -> None:
    # Not that of `HTTPServer`, which asks for the name of the host.
    socketserver.TCPServer.server_bind(self)
    self.server_port = self.server_address[1]


class _Handler(http.server.BaseHTTPRequestHandler):
  server: _Listener
  server_version, sys_version = "optax-dist", ""
  timeout = 30  # Seconds that an idle client keeps a thread.

  def do_GET(self) -> None:
    page = self.server.answer(self.path, self.headers.get("Host", ""))
    self.send_response(page.status)
    self.send_header("Content-Type", page.content_type)
    self.send_header("Content-Length", str(len(page.body)))
    for name, value in page.headers.items():
      self.send_header(name, value)
    self.end_headers()
    if self.command != "HEAD":
      self.wfile.write(page.body)

  do_HEAD = do_GET

  def log_message(self, format: str, *args: Any) -> None:
    """Requests are no news."""
