"""Ranks 1.. of a replica of several processes; rank 0 drives them.

They decide nothing: they execute commands, and report the results.
"""

from __future__ import annotations

import math
from typing import cast

from optax_dist.coordinator.extras.groups import commands
from optax_dist.coordinator.protocol import effects as fx
from optax_dist.coordinator.protocol import inputs as ins
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.entries import Process


class WorkerRank:
  """The core of processes 1, 2 and so on of a replica.

  Attributes:
    over: whether the replica has ended.
  """

  def __init__(self, rank_zero: Process):
    """Creates the core.

    Args:
      rank_zero: the name of process 0 of the replica.
    """
    self.over = False
    self._rank_zero = rank_zero
    self._ended = False

  def step(self, input_: commands.Input, now: float) -> list[commands.Effect]:
    """Processes an input; returns the effects, in order."""
    if self.over:
      return []
    match input_:
      case ins.PeerLost(peer, how, reason) if peer == self._rank_zero:
        if self._ended:
          return []
        return self._end(
          f"The replica can't go on: its process 0 is lost ({how}: {reason})."
        )
      case ins.Received(peer, message):
        if peer == self._rank_zero:
          return self._execute(cast(commands.Effect, message))
        kind = type(message).__name__
        text = f"{peer} sent {kind}, and does not speak for this replica"
        return [fx.Log(text)]
      case msg.Leave(lost=True):
        self.over = True
        return self._report(input_)
      case commands.Signalled():
        return self._report(input_)
      case _ if isinstance(input_, commands.ANSWERS):
        return self._report(cast(commands.Answer, input_))
      case _:
        # Process 0 gets the same request, and acts on it for all.
        return []

  def deadline(self) -> float:
    """Never: process 0 has all deadlines, and this process ends with it."""
    return math.inf

  @property
  def stalled(self) -> bool:
    """Whether others wait, which only process 0 knows."""
    return False

  def missing(self, now: float) -> str:
    """What the process is waiting for, for an error message."""
    return "for what process 0 of its replica says"

  def _execute(self, order: commands.Effect) -> list[commands.Effect]:
    match order:
      case fx.Left() | fx.Finished() | fx.Fail():
        self._ended = True
      case commands.EndGroup(reason):
        return self._end(reason)
      case commands.Ready():
        return self._report(order)
    return [order]

  def _report(self, report: commands.Report) -> list[commands.Effect]:
    return [commands.send(self._rank_zero, report)]

  def _end(self, reason: str) -> list[commands.Effect]:
    self.over = True
    return [commands.EndGroup(reason)]
