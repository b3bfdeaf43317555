"""A process of a replica other than its process 0, which gives the orders.

It decides nothing: it connects to process 0, executes orders, and reports the
results.
"""

from __future__ import annotations

import math
from typing import cast

from optax_dist.coordinator.extras.groups import orders
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol.entries import Process


class Companion:
  """The core of processes 1, 2 and so on of a replica.

  Attributes:
    over: whether the replica has ended.
  """

  def __init__(self, speaker: Process, address: str):
    """Creates the core.

    Args:
      speaker: the name of process 0 of the replica.
      address: address of that process.
    """
    self.over = False
    self._speaker, self._address = speaker, address
    self._ended = False

  def step(self, input_: orders.Input, now: float) -> list[orders.Effect]:
    """Processes an input; returns the effects, in order."""
    if self.over:
      return []
    match input_:
      case ins.Started():
        present = orders.send(self._speaker, orders.Present())
        return [fx.Connect(self._speaker, self._address), present]
      case ins.PeerLost(peer, how, reason) if peer == self._speaker:
        if self._ended:
          return []
        return self._end(
          f"The replica can't go on: its process 0 is lost ({how}: {reason})."
        )
      case ins.Received(peer, message):
        if peer == self._speaker and isinstance(
          message, orders.REPORTS + orders.ORDERS
        ):
          return self._obey(message)
        kind = type(message).__name__
        text = f"{peer} sent {kind}, and does not speak for this replica"
        return [fx.Log("warning", text)]
      case ins.Aborted():
        self.over = True
        return self._report(input_)
      case _ if isinstance(input_, orders.REPORTS):
        return self._report(input_)
      case _:
        # Process 0 gets the same request, and acts on it for all.
        return []

  def deadline(self) -> float:
    """Never: process 0 waits for all, and ends with what it waits for."""
    return math.inf

  @property
  def stalled(self) -> bool:
    """Whether others wait, which only process 0 knows."""
    return False

  def missing(self, now: float) -> str:
    """What it is waiting for, for an error message."""
    return "for what process 0 of its replica says"

  def _obey(self, order: orders.Order | orders.Report) -> list[orders.Effect]:
    match order:
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
