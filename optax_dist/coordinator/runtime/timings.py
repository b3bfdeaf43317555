"""Where a step's time goes: measured by each replica, sent when it submits.

The leader writes these to its journal, on its own clock.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import jax

from optax_dist.coordinator.protocol.codec import replace
from optax_dist.coordinator.protocol.notes import Timings

_COMPILING = "/jax/core/compile/"


class Stopwatch:
  """Measures a training loop from one submission to the next.

      begin -> computes -> computed -> encodes -> submitted -> waits -> begin

  Attributes:
    mark: when the computation began, or was last `computed`.
  """

  def __init__(self) -> None:
    self.mark = self._began = time.monotonic()
    self._compiled, self._cpu = compiled(), time.process_time()
    # Seconds of computation since the last gradient that was taken.
    self._computed = 0.0
    # When the last submission was sent, until the next computation begins.
    self._sent: float | None = None
    # Seconds between them, since the last submission.
    self._waited = 0.0
    self._moved = 0, 0

  def begin(self, first: bool) -> float:
    """A computation begins, perhaps the first of a submission; returns when."""
    now = self.mark = time.monotonic()
    if self._sent is not None:
      self._waited += now - self._sent
      self._sent = None
    if first:
      self._began = now
      self._compiled, self._cpu = compiled(), time.process_time()
    return now

  def computed(self) -> None:
    """A computation ends, or part of one."""
    now = time.monotonic()
    self._computed += now - self.mark
    self.mark = now

  def take(self) -> float:
    """Seconds of computation since the last call."""
    seconds, self._computed = self._computed, 0.0
    return seconds

  def submitted(
    self, exchanged: float, applied: float, moved: tuple[int, int]
  ) -> Timings:
    """What is sent with a submission.

    Args:
      exchanged: seconds that the exchange of the previous one took.
      applied: seconds that the last update took.
      moved: bytes received and sent so far.
    """
    now = time.monotonic()
    made = Timings(
      self._began,
      now,
      compiled() - self._compiled,
      time.process_time() - self._cpu,
      now - self.mark,
      self._waited,
      exchanged,
      min(applied, self._waited),
      moved[0] - self._moved[0],
      moved[1] - self._moved[1],
    )
    self._sent, self._waited, self._moved = now, 0.0, moved
    return made


class Clocks:
  """Aligns the replicas' clocks with the leader's.

  A message takes a time of zero or more, so the fastest arrival of a membership
  gives the best estimate of the clocks' difference. A replica's times are thus
  late by the shortest latency of a message.

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
  ) -> Timings | None:
    """A submission's times on the leader's clock.

    Args:
      incarnation: of the sender's membership.
      timings: the sender's timings.
      arrived: when they arrived, on the leader's clock.

    Returns:
      The timings, with `start` and `sent` on the leader's clock; None if these
      are too large there, since the sender made them up.
    """
    start, sent = timings.start, timings.sent
    behind = arrived - sent
    least = self._least.get(incarnation)
    if least is None or behind < least:
      least = self._least[incarnation] = behind
    start, sent = start + least, sent + least
    if not (math.isfinite(start) and math.isfinite(sent)):
      return None
    return replace(timings, start=start, sent=sent)

  def forget(self, incarnation: int | None) -> None:
    """Forgets a membership that has ended."""
    if incarnation is not None:
      self._least.pop(incarnation, None)


class _Compiled(threading.local):
  seconds = 0.0


_compiled = _Compiled()
_listener = threading.Event()


def compiled() -> float:
  """Seconds that JAX has spent tracing and compiling in this thread.

  Counted from the first call in any thread.
  """
  if not _listener.is_set():
    _listener.set()
    jax.monitoring.register_event_duration_secs_listener(_count)
  return _compiled.seconds


def _count(event: str, duration_secs: float, **_: Any) -> None:
  if event.startswith(_COMPILING):
    _compiled.seconds += duration_secs
