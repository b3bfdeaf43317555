"""A replica of several processes, as seen by one of them.

    process 0    Handover: applies its events  ->  orders.Advance(call, events)
    process 1 .. Handover: as many of its own  <-

`Group` says which process this is. `GroupHandover` lets the training loops of
all processes see the same events at the same points of the program: process 0
reads its events and announces how many; the others read that many.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import numpy as np
from jax.experimental import multihost_utils

from optax_dist.coordinator import errors
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.group import orders
from optax_dist.coordinator.protocol.group.companion import Companion
from optax_dist.coordinator.protocol.group.speaker import Speaker
from optax_dist.coordinator.protocol.node import Node
from optax_dist.coordinator.runtime import handover, last_words
from optax_dist.coordinator.runtime.states import State

# Largest text a process sends at the start: name, address and a digest.
_TEXT = 4096
# Seconds for a program to end by itself when its replica can't continue.
_GRACE = 5.0
# Exit code of the process then: the launcher restarts the replica.
EXIT_CODE = 75

# What decides: a replica's own core, or that of one of its processes.
Core: TypeAlias = Node | Speaker | Companion


@dataclasses.dataclass(frozen=True)
class Group:
  """Which process of its replica this is.

  Attributes:
    process: its index, from 0.
    count: the number of processes.
    gather: given a text, returns those of all processes, in order; all of them
      call it at the same point of the program.
    on_loss: called when a process of the replica is lost, since the rest of it
      can't continue.
  """

  process: int
  count: int
  gather: Callable[[str], list[str]]
  on_loss: Callable[[str], None] = lambda reason: None

  def __post_init__(self) -> None:
    if not 0 <= self.process < self.count:
      raise ValueError(
        f"process must be from 0 to {self.count - 1}, the processes of the"
        f" replica, got {self.process}."
      )


def of_this_program(count: int) -> Group | None:
  """The processes of this JAX program, as one replica.

  Args:
    count: the expected number of processes; for 1, None is returned.

  Raises:
    ValueError: the program has another number of processes.
  """
  if count == 1:
    return None
  if jax.process_count() != count:
    raise ValueError(
      f"processes_per_replica is {count}, and this JAX program has"
      f" {jax.process_count()} processes. Call jax.distributed.initialize in"
      " each of them first, with the replica's own address."
    )
  return Group(jax.process_index(), count, gather, _end_soon)


def meet(
  group: Group | None, own: tuple[str, str], digest: str
) -> tuple[list[tuple[str, str]], str, str]:
  """Exchanges addresses and digests among the processes of a replica.

  Args:
    group: this process's place in its replica; None if it is the only one.
    own: name and address of this process.
    digest: fingerprint of its part of the shared state.

  Returns:
    The names and addresses of all processes, the replica's address, and a
    digest of all.
  """
  if group is None:
    return [own], own[1], digest
  members = [json.loads(x) for x in group.gather(json.dumps([*own, digest]))]
  places = [(name, address) for name, address, _ in members]
  digest = orders.combined([digest for _, _, digest in members])
  return places, orders.join_places(places), digest


def core(
  group: Group | None, config: Config, places: Sequence[tuple[str, str]]
) -> Core:
  """The protocol core of this process; with several, process 0 decides."""
  if group is None:
    return Node(config)
  if not group.process:
    others = [name for name, _ in places[1:]]
    return Speaker(Node(config), others, patience=config.deadlines.replica)
  pause = config.deadlines.pace / 8
  return Companion(*places[0], pause=pause, patience=config.timeout)


def gather(text: str) -> list[str]:
  """Returns a short text of each process of this JAX program, in their order."""
  raw = text.encode()
  if len(raw) > _TEXT:
    raise ValueError(
      f"The address of a process may have {_TEXT} bytes, got {len(raw)}: {text}"
    )
  padded = np.frombuffer(raw.ljust(_TEXT), np.uint8)
  found = multihost_utils.process_allgather(padded)
  return [bytes(np.asarray(row)).decode().rstrip() for row in found]


def _end_soon(reason: str) -> None:
  """Ends this process, in case it hangs in a collective with a lost process."""

  def end() -> None:
    time.sleep(_GRACE)
    end_process(f"{reason} This process ends, too.")

  threading.Thread(target=end, name="optax-dist-end", daemon=True).start()


def end_process(text: str) -> None:
  """Ends this process without cleaning up; the launcher restarts its replica.

  Args:
    text: why, for the standard error stream.
  """
  last_words.say(text)
  os._exit(EXIT_CODE)


class GroupHandover(handover.Handover):
  """A handover that changes only at points common to all training loops."""

  def __init__(
    self,
    published: State,
    tell: Callable[[orders.Advance], None] | None,
    patience: float,
  ):
    """Creates the handover.

    Args:
      published: the first state.
      tell: sends to the other processes, in process 0; None in the others.
      patience: seconds that another process may take to reach the same point of
        the program.
    """
    super().__init__(published)
    self._tell_others, self._patience = tell, patience
    self._events: collections.deque[handover.Event] = collections.deque()
    self._advances: collections.deque[orders.Advance] = collections.deque()
    self._seen = self._calls = 0
    self._closed = False

  # Called by the event loop.

  def notify(self, event: handover.Event) -> None:
    self._events.append(event)

  def advance(self, order: orders.Advance) -> None:
    """Process 0's training loop has advanced; `wake` follows."""
    self._advances.append(order)

  # Called by the training loop.

  def sync(self) -> None:
    self.agree(False)

  def agree(self, flag: bool) -> bool:
    if self._closed or self.failure is not None:
      return flag
    if self._tell_others is None:
      return self._follow(self._patience)
    self._look(flag)
    return flag

  def close(self) -> None:
    self._closed = True

  def wait(self, ready: Callable[[], bool], timeout: float) -> bool:
    timed_out, left = False, timeout
    while not (ready() or self.is_over or timed_out):
      if self._tell_others is None:
        timed_out = self._follow(timeout + self._patience)
        continue
      changed = lambda: bool(self._events) or self.failure is not None
      left -= self._wait_for(changed, left)
      if self.failure is None:
        timed_out = not self._events
        self._look(timed_out)
    return ready()

  def _look(self, flag: bool) -> None:
    """Process 0 applies all events so far."""
    assert self._tell_others is not None
    events = self._seen + len(self._events)
    self._tell_others(orders.Advance(self._calls, events, flag))
    self._take(events)

  def _follow(self, patience: float) -> bool:
    """Applies as many events as process 0 did; returns its decision."""
    ready = lambda: bool(self._advances) or self.failure is not None
    self._wait_for(ready, patience)
    if self.failure is not None:
      return False
    if not self._advances:
      self.failure = errors.CoordinatorError(
        "Process 0 of the replica did not come to the same place of the program"
        f" in {patience:.1f} s."
      )
      return False
    order = self._advances.popleft()
    if order.call != self._calls:
      self.failure = errors.CoordinatorError(
        "The processes of the replica do not make the same calls: process 0 is"
        f" at call {order.call}, this one at {self._calls}."
      )
      return False
    self._take(order.events)
    return order.flag

  def _take(self, events: int) -> None:
    self._calls += 1
    while self._seen < events:
      self._apply(self._events.popleft())
      self._seen += 1
      # All processes compute each state at the same point, and in this order.
      self.published.get()
