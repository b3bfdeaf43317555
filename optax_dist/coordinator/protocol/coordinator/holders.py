"""Lost replicas that may have a newer state than all that are here.

A step that was committed is not given up while a process may live that has it: it is
waited for until it calls, or has ended. Its connection may tell (it was closed), or
its address, which is called: there it listens for as long as it lives.
"""

from __future__ import annotations

import math

from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.coordinator.members import Members
from optax_dist.coordinator.protocol.coordinator.outbox import Outbox
from optax_dist.coordinator.protocol.entries import (
  Departed,
  Process,
  ReplicaId,
)
from optax_dist.coordinator.protocol.history import History


class Holders:
  """Whom a run waits for before it begins again from an older state."""

  def __init__(
    self, config: Config, history: History, members: Members, out: Outbox
  ):
    """Starts without having asked anybody.

    Args:
      config: the run's.
      history: what the log says of those that are lost.
      members: those that wait.
      out: where calls go.
    """
    self._limits = config.deadlines
    self._history, self._members, self._out = history, members, out
    # Whom members know to be waited for.
    self._announced: list[ReplicaId] = []
    # Processes whose connection was closed, and those that have ended.
    self._closed: set[Process] = set()
    self._ended: set[Process] = set()
    # When to call them; infinity while they are called, or are connected.
    self._call_at: dict[Process, float] = {}

  def has_ended(self, process: Process) -> None:
    """A process has said that it ends."""
    self._ended.add(process)

  def lost(self, process: Process, how: str, now: float) -> None:
    """A connection has ended, or could not be made.

    Args:
      process: the other end.
      how: see `inputs.PeerLost`.
      now: the time.
    """
    if how == "gone":
      self._ended.add(process)
    elif how == "unreachable" and process in self._closed:
      self._ended.add(process)  # So has its host.
    elif how == "broken":
      self._closed.add(process)
    if process in self._call_at:
      self._call_at[process] = now + self._limits.reconnect

  def deadlines(self, since: float) -> list[float]:
    """When `wait` may find something, if somebody waits since then."""
    limits, calls = self._limits, self._call_at.values()
    is_announced = bool(self._announced) or not calls
    first = since + limits.reconnect
    early = self._history.has_no_commits or not is_announced
    return [*([first] if early else ()), since + limits.timeout, *calls]

  def wait(self, step: int, since: float, now: float) -> bool:
    """Whether to wait for any; calls those that were not called, and says so.

    Args:
      step: the newest state that is here.
      since: since when a replica that is here waits.
      now: the time.
    """
    # Its server may have gone after the last byte.
    fetched = any(state.fetches for state in self._members)
    if self._history.has_no_commits:
      # Any state is as good, but one is known to some; and who has brought the newest
      # one is to call again.
      history = self._history
      known = fetched or bool(history.lost()) or step < history.origin.step
      return known and now < since + self._limits.reconnect
    awaited = [
      d.member for d in self._history.lost() if self._may_have(d, step)
    ]
    times = self._call_at
    self._call_at = {m.process: times.get(m.process, now) for m in awaited}
    for member in awaited:
      if now >= self._call_at[member.process]:
        self._call_at[member.process] = math.inf
        self._out.add(fx.Connect(member.process, member.address))
    replicas = [member.replica for member in awaited]
    if (
      awaited
      and now >= since + self._limits.reconnect
      and replicas != self._announced
    ):
      self._announced = replicas
      self._announce(since, now)
    return (fetched or bool(awaited)) and now < since + self._limits.timeout

  def _announce(self, since: float, now: float) -> None:
    step, limit = self._history.step, self._limits.timeout
    names = ", ".join(map(str, self._announced))
    text = (
      f"nobody who is here has the state of step {step}: waiting for replica"
      f" {names}, which may have it, for {limit:g} s at most"
    )
    self._out.add(fx.Log(text))
    self._out.notify_all(self._members, msg.Stalled(step, now - since, text))

  def _may_have(self, lost: Departed, step: int) -> bool:
    """Whether it may come with a newer state than that of a step."""
    # It may have had the mean of the step that was being taken.
    return lost.step + 1 > step and lost.member.process not in self._ended
