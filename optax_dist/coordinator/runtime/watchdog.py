"""Detects a training loop that is alive but stuck, and reports where it is.

    training loop   begin, submitted, wait  ->  Steps
    Watchdog        is_stuck                ->  stacks, and eviction if wanted

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
from optax_dist.coordinator.transport.clock import AwakeClock

# A step that no one waits for may be an evaluation, or a pause in a notebook.
_UNHURRIED = 3600.0
# Seconds within which the thread looks at the clock.
_LONGEST = 2.0
# Characters of the stacks written to the journal.
_MAX_STACK_CHARS = 16_000


class Steps:
  """How long steps take, and whether the current one takes too long.

  A step lasts from when the training loop gets parameters, or samples, until it
  submits its gradient. Two threads call this, under a lock.

  Attributes:
    thread: that of the training loop.
  """

  def __init__(self, limit: float | liveness.Rule, now: Callable[[], float]):
    """Starts without a step.

    Args:
      limit: the seconds a step may take, or the rule that adapts them.
      now: a clock, in seconds.
    """
    self._seen: liveness.Silence | None = None
    self._limit = 0.0
    if isinstance(limit, liveness.Rule):
      self._seen = liveness.Silence(limit)
    else:
      self._limit = limit
    self._now, self._lock = now, threading.Lock()
    self._began: float | None = None
    self.thread = 0

  @property
  def deadline(self) -> float:
    """How long a step may take, in seconds."""
    return self._limit if self._seen is None else self._seen.deadline

  def begin(self) -> None:
    """The training loop starts to compute."""
    with self._lock:
      self._began = self._now()
    self.thread = threading.get_ident()

  def submitted(self) -> None:
    """Its gradient was submitted."""
    with self._lock:
      if self._seen is not None and self._began is not None:
        self._seen.add(self._now() - self._began)
      self._began = None

  def wait(self) -> None:
    """It waits for others, which has its own deadlines."""
    with self._lock:
      self._began = None

  def lasts(self) -> float:
    """How long the current step has taken; 0.0 if there is none."""
    with self._lock:
      return 0.0 if self._began is None else self._now() - self._began

  def is_stuck(self, awaited: bool) -> bool:
    """Whether it takes so long that the replica should be evicted.

    Args:
      awaited: whether other replicas wait.
    """
    most = self.deadline
    if self._seen is not None and not awaited:
      most = max(_UNHURRIED, most)
    return self.lasts() > most


class Watchdog:
  """A thread that checks `Steps`, logs a stuck one, and evicts the replica.

  Attributes:
    steps: records what the training loop does.
  """

  def __init__(
    self,
    limit: float | liveness.Rule,
    name: str,
    awaited: Callable[[], bool],
    evict: Callable[[str, str], None] | None,
  ):
    """Creates the watchdog; `start` starts it.

    Args:
      limit: see `Steps`.
      name: name of the replica, for messages.
      awaited: whether other replicas wait.
      evict: evicts the replica, given the reason and its threads' stacks;
        None: it is only logged.
    """
    # Time in which the process was suspended isn't the step's fault.
    self.steps = Steps(limit, AwakeClock(_LONGEST).now)
    self._name, self._awaited, self._evict = name, awaited, evict
    self._every = min(1.0, self.steps.deadline / 8)
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
    steps, reported = self.steps, False
    while not self._closed.wait(self._every):
      if not steps.is_stuck(self._awaited()):
        reported = False
        continue
      lasts = steps.lasts()
      if reported or not lasts:
        continue  # It was reported, or submitted just now.
      reported = True
      reason = f"stuck: its step has taken {lasts:.1f} s so far"
      found = stacks(steps.thread)
      text = f"{self._name}: {reason}. Its threads:\n{found}"
      process_exit.say(text)
      if self._evict is not None:
        self._evict(reason, found)
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
