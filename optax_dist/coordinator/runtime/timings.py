"""What a step is made of: measured by each replica, sent with its submission.

The protocol passes these on as bytes that it does not read; the leader's journal
writes them, on its own clock.
"""

from __future__ import annotations

import math
import struct
import threading
from typing import Any, NamedTuple

import jax

_FORMAT = struct.Struct("<8d2q")
_COMPILING = "/jax/core/compile/"


class Timings(NamedTuple):
  """How a replica spent its time up to a submission.

  Seconds. `start` and `sent` are on the replica's own clock, which never goes
  back. What comes after a submission can only be sent with the next one: the
  last three are of the submission before, and 0 if there was none.

  Attributes:
    start: when computing began.
    sent: when it was submitted.
    compiled: of the time since `start`, what jax took to trace and compile.
    cpu: of all of the process's threads meanwhile; more than the time that has
      passed where several cores were busy.
    encoded: for writing the gradient as bytes.
    waited: from the submission before until computing could begin again.
    exchanged: of that, from the exchange's begin until its mean was there.
    applied: of that, for the update.
    bytes_in: bytes of means and states that came since the submission before.
    bytes_out: bytes of gradients, means and states that went.

  Example:
    >>> timings = Timings(10.0, 10.5, 0.25, 0.375, 0.0, 0.5, 0.25, 0.125, 8, 8)
    >>> Timings.unpack(timings.pack()) == timings
    True
  """

  start: float
  sent: float
  compiled: float
  cpu: float
  encoded: float
  waited: float
  exchanged: float
  applied: float
  bytes_in: int = 0
  bytes_out: int = 0

  def pack(self) -> bytes:
    """As bytes."""
    return _FORMAT.pack(*self)

  @classmethod
  def unpack(cls, raw: bytes) -> Timings | None:
    """What `pack` has made; None for any other bytes."""
    if len(raw) != _FORMAT.size:
      return None
    numbers = _FORMAT.unpack(raw)
    # One that is not finite makes the sum so; and a sum is quick.
    if not math.isfinite(sum(numbers)):
      return None
    return cls._make(numbers)


class Clocks:
  """Brings the replicas' clocks to the leader's.

  A message takes some time, never less than none: of all arrivals of a
  membership, the one that took least tells the difference of the two clocks best.
  So a replica's times are late by the shortest way of a message.

  Example:
    >>> clocks = Clocks()
    >>> sent = lambda at: Timings(at - 1, at, 0, 0, 0, 0, 0, 0)
    >>> clocks.align(7, sent(100.0), 2.5).sent
    2.5
    >>> clocks.align(7, sent(101.0), 3.25).sent
    3.25
    >>> clocks.align(7, sent(102.0), 4.75).start
    3.25
  """

  def __init__(self) -> None:
    self._least: dict[int, float] = {}

  def align(
    self, incarnation: int, timings: Timings, arrived: float
  ) -> Timings:
    """A submission's times on the leader's clock.

    Args:
      incarnation: of the sender's membership.
      timings: the sender's.
      arrived: when they arrived, on the leader's clock.

    Returns:
      The same, with `start` and `sent` on the leader's clock.
    """
    start, sent = timings.start, timings.sent
    behind = arrived - sent
    least = self._least.get(incarnation)
    if least is None or behind < least:
      least = self._least[incarnation] = behind
    return Timings(
      start + least,
      sent + least,
      *timings[2:8],
      timings.bytes_in,
      timings.bytes_out,
    )

  def forget(self, incarnation: int) -> None:
    """The membership has ended."""
    self._least.pop(incarnation, None)


class _Compiled(threading.local):
  seconds = 0.0


_compiled = _Compiled()
_listener = threading.Event()


def compiled() -> float:
  """Seconds that jax has spent on tracing and compiling in this thread.

  Counted from the first call in any thread on.
  """
  if not _listener.is_set():
    _listener.set()
    jax.monitoring.register_event_duration_secs_listener(_count)
  return _compiled.seconds


def _count(event: str, duration_secs: float, **_: Any) -> None:
  if event.startswith(_COMPILING):
    _compiled.seconds += duration_secs
