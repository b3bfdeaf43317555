"""Lost replicas that may have a newer state than all members.

A committed step is not abandoned while a process that may have its state is perhaps
alive: the run waits until that process calls, or is known to have ended. Its closed
connection may show that it has ended, or an attempt to connect to its address, where
it listens as long as it lives.
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
  """The lost replicas that a run waits for before it begins from an older state."""

  def __init__(
    self, config: Config, history: History, members: Members, out: Outbox
  ):
    """Starts before any lost replica was called.

    Args:
      config: the run's.
      history: the log's decisions; it knows the lost replicas.
      members: the members, which wait.
      out: where calls go.
    """
    self._limits = config.deadlines
    self._history, self._members, self._out = history, members, out
    # The lost replicas that were named to the waiting members.
    self._announced: list[ReplicaId] = []
    # Processes whose connection was closed, and processes that have ended.
    self._closed: set[Process] = set()
    self._ended: set[Process] = set()
    # When to call each process; infinity while it is called, or is connected.
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
      self._ended.add(process)  # Its host does not answer either.
    elif how == "broken":
      self._closed.add(process)
    if process in self._call_at:
      self._call_at[process] = now + self._limits.reconnect

  def deadlines(self, since: float) -> list[float]:
    """When `wait` may change its answer, if members have waited since then."""
    limits, calls = self._limits, self._call_at.values()
    is_announced = bool(self._announced) or not calls
    first = since + limits.reconnect
    early = self._history.has_no_commits or not is_announced
    return [*([first] if early else ()), since + limits.timeout, *calls]

  def wait(self, step: int, since: float, now: float) -> bool:
    """Whether to wait for lost replicas; calls them, and names them to the members.

    Args:
      step: the step of the newest state that a member has.
      since: since when members wait.
      now: the time.
    """
    # A member may have its snapshot, even if the server was lost after the last byte.
    fetched = any(state.fetches for state in self._members)
    if self._history.has_no_commits:
      # Before the first step any start state will do. But lost replicas, or a member
      # that has fetched it, may have the state that the run began from; and the replica
      # that brought the newest state gets time to call again.
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
      f"no connected replica has the state of step {step}: waiting for replica"
      f" {names}, which may have it, for {limit:g} s at most"
    )
    self._out.add(fx.Log(text))
    self._out.notify_all(self._members, msg.Stalled(step, now - since, text))

  def _may_have(self, lost: Departed, step: int) -> bool:
    """Whether a lost replica may come back with a newer state than that of a step."""
    # When it was lost, it may already have had the mean of the next commit.
    return lost.step + 1 > step and lost.member.process not in self._ended
