"""Where a step's time goes: measured by each replica, sent when it submits."""

from __future__ import annotations

import threading
import time
from typing import Any

import jax

from optax_dist.coordinator.protocol.journal_events import Timings

_COMPILING = "/jax/core/compile/"


class Stopwatch:
  """Measures a training loop from one submission to the next.

      begin -> computes -> computed -> encodes -> submitted -> waits -> begin

  Attributes:
    mark: when the computation began, or `computed` was last called.
    step: a new object for each step that is being computed, for the watchdog; None
      while no step is computed.
    thread: the thread of the training loop.
  """

  def __init__(self) -> None:
    self.step: object | None = None
    self.thread = 0
    self.mark = self._began = time.monotonic()
    self._compiled, self._cpu = _compiled.seconds, time.process_time()
    # Seconds of computation since the last gradient that was taken.
    self._computed = 0.0
    # When the last submission was sent, until the next computation begins.
    self._sent: float | None = None
    # Seconds from submissions to the next computations, since the last submission.
    self._waited = 0.0
    self._moved = 0, 0

  def begin(self, first: bool) -> None:
    """A computation begins, perhaps the first of a submission."""
    self.thread = threading.get_ident()
    now = self.mark = time.monotonic()
    if self._sent is not None:
      self._waited += now - self._sent
      self._sent = None
    if first:
      self._began = now
      self._compiled, self._cpu = _compiled.seconds, time.process_time()

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
    """The timings to send with a submission.

    Args:
      exchanged: seconds that the exchange of the previous submission took.
      applied: seconds that the last update took.
      moved: bytes received and sent so far.
    """
    now = time.monotonic()
    made = Timings(
      now - self._began,
      _compiled.seconds - self._compiled,
      time.process_time() - self._cpu,
      now - self.mark,
      self._waited,
      exchanged,
      min(applied, self._waited),
      moved[0] - self._moved[0],
      moved[1] - self._moved[1],
    )
    self._sent, self._waited, self._moved = now, 0.0, moved
    self.step = None
    return made


class _Compiled(threading.local):
  """Seconds that JAX has spent tracing and compiling in a thread."""

  seconds = 0.0


_compiled = _Compiled()


def _count(event: str, duration_secs: float, **_: Any) -> None:
  if event.startswith(_COMPILING):
    _compiled.seconds += duration_secs


# At the import, so that it is registered exactly once.
jax.monitoring.register_event_duration_secs_listener(_count)
