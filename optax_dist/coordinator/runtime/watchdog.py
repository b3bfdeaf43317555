"""Detects a training loop that is alive but stuck, and reports where it is.

    training loop   Stopwatch.step   ->  Steps
    Watchdog        lasts, is_stuck  ->  stacks, and eviction if wanted

A collective that waits indefinitely, or a data loader that blocks, can't be
seen from outside, since heartbeats go on. A thread checks how long the current
step has taken.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable

from optax_dist.coordinator.protocol import liveness
from optax_dist.coordinator.runtime import process_exit
from optax_dist.coordinator.runtime.timings import Stopwatch
from optax_dist.coordinator.transport.clock import AwakeClock

# Seconds for a step that no other replica waits for: it may be an evaluation, or a
# pause in a notebook.
_UNHURRIED = 3600.0
# Characters of the stacks written to the journal.
_MAX_STACK_CHARS = 16_000


class Steps:
  """How long steps take, and whether the current one takes too long.

  A step begins when the training loop gets parameters or samples. It ends when the loop
  submits its gradient, or waits for others, since waits have their own deadlines. The
  loop's stopwatch has the current step, and the watchdog polls it, often enough for its
  deadlines.
  """

  def __init__(self, limit: liveness.Rule, stopwatch: Stopwatch):
    """Starts without a step.

    Args:
      limit: the rule for the seconds that a step may take.
      stopwatch: the stopwatch of the training loop.
    """
    self._taken, self._stopwatch = liveness.Silence(limit), stopwatch
    # The step at the last poll, and when it was first seen.
    self._looked_at: object | None = None
    self._since = 0.0

  @property
  def deadline(self) -> float:
    """How long a step may take, in seconds."""
    return self._taken.deadline

  def lasts(self, now: float) -> float:
    """How long the current step has taken; 0.0 if there is none."""
    current = self._stopwatch.step
    if current != self._looked_at:
      if self._looked_at is not None:
        self._taken.add(now - self._since)
      self._looked_at, self._since = current, now
    return 0.0 if current is None else now - self._since

  def is_stuck(self, lasts: float, awaited: bool) -> bool:
    """Whether the step takes so long that the replica should be evicted.

    Args:
      lasts: how long the step has taken.
      awaited: whether other replicas wait.
    """
    most = self.deadline
    rule = self._taken.rule
    if rule.floor < rule.ceiling and not awaited:
      most = max(_UNHURRIED, most)  # The caller has set no `step_timeout`.
    return lasts > most


class Watchdog:
  """A thread that checks `Steps`, logs a stuck one, and evicts the replica."""

  def __init__(
    self,
    limit: liveness.Rule,
    stopwatch: Stopwatch,
    name: str,
    awaited: Callable[[], bool],
    evict: Callable[[str, str], None] | None,
  ):
    """Creates the watchdog; `start` starts it.

    Args:
      limit: see `Steps`.
      stopwatch: see `Steps`.
      name: name of the replica, for messages.
      awaited: whether other replicas wait.
      evict: evicts the replica, given the reason and its threads' stacks; if None,
        a stuck step is only logged.
    """
    self._steps, self._stopwatch = Steps(limit, stopwatch), stopwatch
    self._name, self._awaited, self._evict = name, awaited, evict
    self._every = min(1.0, self._steps.deadline / 8)
    self._closed = threading.Event()
    self._thread = threading.Thread(
      target=self._run, name="optax-dist-watchdog", daemon=True
    )

  def start(self) -> None:
    """Starts the thread."""
    self._thread.start()

  def close(self) -> None:
    """Stops the thread."""
    self._closed.set()
    current = threading.current_thread()
    if self._thread.ident is not None and self._thread is not current:
      self._thread.join(1.0)

  def _run(self) -> None:
    steps, reported = self._steps, False
    # Time in which the process was suspended isn't the step's fault.
    clock = AwakeClock(2 * self._every)
    while not self._closed.wait(self._every):
      lasts = steps.lasts(clock.now())
      if not steps.is_stuck(lasts, self._awaited()):
        reported = False
        continue
      if reported:
        continue
      reported = True
      reason = f"stuck: its step has taken {lasts:.1f} s so far"
      shown = stacks(self._stopwatch.thread)
      text = f"{self._name}: {reason}. Its threads:\n{shown}"
      process_exit.say(text)
      if self._evict is not None:
        self._evict(reason, shown)
        return


def stacks(first: int) -> str:
  """The stacks of all threads but the calling one, the latest call last.

  Args:
    first: the thread that comes first.

  Example:
    >>> import threading
    >>> event = threading.Event()
    >>> thread = threading.Thread(target=event.wait, name="waits")
    >>> thread.start()
    >>> text = stacks(thread.ident)
    >>> event.set()
    >>> text.startswith("Thread waits:") and "in wait" in text
    True
  """
  names = {t.ident: t.name for t in threading.enumerate()}
  frames = sys._current_frames()
  frames.pop(threading.get_ident(), None)
  texts = []
  for ident in sorted(frames, key=lambda i: (i != first, i)):
    lines = "".join(traceback.format_stack(frames[ident]))
    texts.append(f"Thread {names.get(ident, ident)}:\n{lines}")
  return "".join(texts)[:_MAX_STACK_CHARS]
