"""The coordinator's connection with a process that is no replica, or not yet.

Whenever the connection is lost, it is made again, until that can't help.
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

# Seconds until the next call of a lost coordinator, and seconds to wait for an event.
_RETRY_SECONDS, _POLL_SECONDS = 0.2, 1.0


class Caller:
  """Calls a coordinator, and if that dies, the next one.

  Attributes:
    endpoint: a transport, which the caller owns, and the coordinator.
    trouble: why the coordinator is not connected; "" while it is.
    since: since when it is connected or not, by `time.monotonic`.
  """

  def __init__(
    self,
    endpoint: endpoints.Endpoint,
    call: Callable[[], msg.Message],
    hear: Callable[[msg.Message], None],
    refused: Callable[[str], None],
  ):
    """Prepares the caller; nothing happens before `start`.

    Args:
      endpoint: a transport, and the coordinator.
      call: the first message of a connection.
      hear: called with each message, in the caller's thread.
      refused: called in the same thread, once, with the reason why no call can help.
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
    with contextlib.suppress(RuntimeError):  # The transport is closed.
      self.endpoint.transport.wake()

  def close(self) -> None:
    """Closes the connection, if there is one, after sending pending messages."""
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
      # Events of other peers are ignored: they may connect, but send nothing of use.
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
          # Only a first call is final: later a certificate may have expired, say.
          self._end(reason)
        elif not self._closed:
          time.sleep(_RETRY_SECONDS)
          self._connect()

  def _end(self, reason: str) -> None:
    if not self._closed:
      self._closed = True
      self._refused(reason)
