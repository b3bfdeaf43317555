"""A connection to the coordinator of a process that is no replica, or not yet.

It is made again whenever it is lost, until that can't help.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable

from optax_dist.coordinator.protocol import codec
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.runtime import endpoint as endpoints
from optax_dist.coordinator.transport import interface as transports

# Seconds to the next call of a coordinator that is lost, and for the next event.
_RETRY_SECONDS, _POLL_SECONDS = 0.2, 1.0


class Caller:
  """Calls a coordinator, and the next one.

  Attributes:
    endpoint: a transport, which it owns, and the coordinator.
    trouble: why it is not connected; "" while it is.
    since: since when that has been so; by `time.monotonic`.
  """

  def __init__(
    self,
    endpoint: endpoints.Endpoint,
    call: Callable[[], msg.Message],
    hear: Callable[[msg.Message], None],
    refused: Callable[[str], None],
  ):
    """Prepares it; nothing happens before `start`.

    Args:
      endpoint: a transport, and the coordinator.
      call: the first message of a connection.
      hear: called in its thread with each message.
      refused: called in its thread, once, with the reason why no call can help.
    """
    self.endpoint = endpoint
    self._call, self._hear, self._refused = call, hear, refused
    self.trouble, self.since = "it has not answered yet", time.monotonic()
    self._closed = self._says = self._was_up = False
    self._thread = threading.Thread(
      target=self._run, name="optax-dist-caller", daemon=True
    )

  def start(self) -> None:
    """Calls the coordinator, in a thread of its own."""
    self._thread.start()

  def say_again(self) -> None:
    """Sends the first message of a connection once more, since it has changed."""
    self._says = True
    with contextlib.suppress(RuntimeError):  # It is closed.
      self.endpoint.transport.wake()

  def close(self) -> None:
    """Closes the connection; what was said before is sent first, if there is one."""
    self._closed = True
    with contextlib.suppress(RuntimeError):
      self.endpoint.transport.wake()
    self._thread.join(_POLL_SECONDS)

  # In its thread.

  def _run(self) -> None:
    transport = self.endpoint.transport
    try:
      self._connect()
      while not self._closed:
        events = transport.poll(_POLL_SECONDS)
        if self._says and not self.trouble:
          self._says = False
          self._send()
        for event in events:
          self._handle(event)
    except Exception as error:
      self._end(repr(error))
    finally:
      with contextlib.suppress(Exception):
        self.endpoint.close("it ends, or joins")

  def _connect(self) -> None:
    self.endpoint.connect(endpoints.COORDINATOR, self.endpoint.coordinator)
    self._send()

  def _send(self) -> None:
    encoded = msg.MESSAGES.encode(self._call())
    self.endpoint.transport.send(endpoints.COORDINATOR, [encoded])

  def _handle(self, event: transports.Event) -> None:
    match event:
      # Others may connect, and have nothing to say.
      case transports.PeerUp(endpoints.COORDINATOR):
        self.trouble, self.since = "", time.monotonic()
        self._was_up = True
      case transports.Message(endpoints.COORDINATOR, payload):
        try:
          message = msg.MESSAGES.decode(payload)
        except codec.BadMessage as error:
          message = msg.Rejected(str(error))
        if isinstance(message, msg.Refused):
          self._end(message.reason)
        elif isinstance(message, msg.Rejected):
          self._end(
            f"it has another version of optax_dist ({message.reason}). Install the"
            " same one for all"
          )
        else:
          self._hear(message)
      case transports.PeerLost(endpoints.COORDINATOR, how, reason):
        if not self.trouble:
          self.since = time.monotonic()
        self.trouble = reason
        if how == "refused" and not self._was_up:
          self._end(reason)  # Later a certificate may have expired, say.
        elif not self._closed:
          time.sleep(_RETRY_SECONDS)
          self._connect()

  def _end(self, reason: str) -> None:
    if not self._closed:
      self._closed = True
      self._refused(reason)
