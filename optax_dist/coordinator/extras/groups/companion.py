"""A process of a replica other than its process 0, which gives the orders.

It decides nothing. It finds the run, so that it can talk to process 0; then it
executes orders, and reports the results.
"""

from __future__ import annotations

import math
from typing import cast

from optax_dist.coordinator.extras.groups import orders
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol.entries import Process, Run
from optax_dist.coordinator.protocol.log import RUN_KEY


class Companion:
  """The core of processes 1, 2 and so on of a replica.

  Attributes:
    over: whether the replica has ended.
  """

  def __init__(
    self, speaker: Process, address: str, *, pause: float, patience: float
  ):
    """Creates the core.

    Args:
      speaker: the name of process 0 of the replica.
      address: address of that process.
      pause: seconds between attempts to find the run and process 0.
      patience: seconds after which it gives up.
    """
    self.over = False
    self._speaker, self._address = speaker, address
    self._pause, self._patience = pause, patience
    self._requests = 0
    self._found_run = self._welcome = self._ended = False
    self._retry_at = self._give_up_at = math.inf

  def step(self, input_: orders.Input, now: float) -> list[orders.Effect]:
    """Processes an input; returns the effects, in order."""
    out: list[orders.Effect] = []
    if not self.over:
      out += self._handle(input_, now)
    if not self.over and not self._welcome:
      if now >= self._give_up_at:
        text = f"A process has waited {self._what_is_missing(now)}."
        self._ended = self._welcome = True
        return [*out, fx.Fail("CoordinatorError", text)]
      if now >= self._retry_at:
        out += self._look()
    return out

  def deadline(self) -> float:
    """When `TimePassed` must be the next input, at the latest."""
    if self.over or self._welcome:
      return math.inf
    return min(self._retry_at, self._give_up_at)

  @property
  def stalled(self) -> bool:
    """Whether others wait, which only process 0 knows."""
    return False

  def missing(self, now: float) -> str:
    """What it is waiting for, for an error message."""
    if self._welcome:
      return "for what process 0 of its replica says"
    return self._what_is_missing(now)

  def _handle(self, input_: orders.Input, now: float) -> list[orders.Effect]:
    match input_:
      case ins.Started():
        self._give_up_at = now + self._patience
        return self._look()
      case ins.GetAnswered():
        if self._found_run or not isinstance(input_.value, Run):
          self._retry_at = now + self._pause
          return []
        self._found_run = True
        return [fx.UseRun(input_.value.nonce), *self._look()]
      case ins.PeerLost(peer, how, reason) if peer == self._speaker:
        if self._ended:
          return []
        if not self._welcome:
          # It may not know the run yet.
          self._retry_at = now + self._pause
          return []
        return self._end(
          f"The replica can't go on: its process 0 is lost ({how}: {reason})."
        )
      case ins.Received(peer, message) if isinstance(
        message, orders.REPORTS + orders.ORDERS
      ):
        if peer == self._speaker:
          return self._obey(message)
        text = f"{peer} gives orders, and does not speak for this replica"
        return [fx.Log("warning", text)]
      case ins.Aborted():
        self.over = True
        return self._report(input_)
      case _ if isinstance(input_, orders.REPORTS):
        return self._report(input_)
      case _:
        # Process 0 gets the same request, and acts on it for all.
        return []

  def _look(self) -> list[orders.Effect]:
    """Looks for the run, or else for process 0."""
    self._retry_at = math.inf
    if not self._found_run:
      self._requests += 1
      return [fx.Get(self._requests, RUN_KEY)]
    return [
      fx.Connect(self._speaker, self._address),
      orders.send(self._speaker, orders.Present()),
    ]

  def _obey(self, order: orders.Order | orders.Report) -> list[orders.Effect]:
    match order:
      case orders.Welcomed():
        self._welcome = True
        return []
      case fx.Left() | fx.Finished() | fx.Fail():
        self._ended = True
        return [order]
      case orders.EndGroup(reason):
        return self._end(reason)
      case _:
        return [cast(orders.Effect, order)]

  def _report(self, report: orders.Report) -> list[orders.Effect]:
    return [orders.send(self._speaker, report)]

  def _end(self, reason: str) -> list[orders.Effect]:
    self.over = True
    return [orders.EndGroup(reason)]

  def _what_is_missing(self, now: float) -> str:
    what = "process 0 of its replica" if self._found_run else "the run's store"
    waited = now - (self._give_up_at - self._patience)
    return f"for {what}, since {waited:.1f} s"
