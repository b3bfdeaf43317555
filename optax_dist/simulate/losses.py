"""Failures and repairs recorded in a journal."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from optax_dist.coordinator import journal
from optax_dist.quorum.events import Replica
from optax_dist.simulate.computations import contributions

# Rounding of times in a journal.
ROUNDING = 1e-6


class Loss(NamedTuple):
  """One loss of a replica.

  Attributes:
    replica: the replica.
    time: when it was detected, since the run's start.
    unnoticed: seconds for which it was overdue by then.
    length: seconds until it computed again, or until the journal ended.
    ended: whether it computed again before the journal ended.
  """

  replica: Replica
  time: float
  unnoticed: float
  length: float
  ended: bool = True


def losses_in(
  part: Sequence[journal.Record], usual: float
) -> tuple[list[Loss], float]:
  """The losses of a run.

  Args:
    part: one of the runs from `journal.segments`.
    usual: seconds that hardly any computation exceeds.

  Returns:
    The losses, in order of time, and the replica-seconds in which a replica was
    present, and could be lost.
  """
  joined: dict[Replica, float] = {}
  last_seen: dict[Replica, float] = {}
  open_: dict[Replica, Loss] = {}
  done: list[Loss] = []
  up = 0.0
  for record in part:
    kind, now = record["kind"], record["time"]
    replica = record.get("replica", -1)
    if kind == "join":
      # A membership that replaces another one has no `lost` record of its own.
      up += now - joined.get(replica, now)
      joined[replica] = last_seen[replica] = now
      if replica in open_:
        away = now - open_[replica].time
        open_[replica] = open_[replica]._replace(length=away)
    elif kind in ("lost", "leave") and replica in joined:
      up += now - joined.pop(replica)
      if kind == "lost" and record.get("reason") != "replaced":
        if replica in open_:  # Lost again before it computed.
          done.append(open_[replica])
        overdue = now - last_seen.get(replica, now) - usual
        open_[replica] = Loss(replica, now, max(0.0, overdue), math.inf)
    elif kind in ("commit", "drop"):
      for gradient in contributions(record):
        who, timings = gradient["replica"], gradient.get("timings")
        last_seen[who] = now
        loss = open_.get(who)
        if loss is None:
          continue
        if record.get("reason") == "lost":
          # The replica's gradient had arrived: it waited for others, and was not
          # overdue.
          open_[who] = loss._replace(unnoticed=0.0)
        elif loss.length < math.inf:
          if timings is not None:
            arrived = journal.arrived(record, gradient)
            sent = now if arrived is None else arrived
            begun = sent - timings["total"] - loss.time
            loss = loss._replace(length=max(loss.length, begun))
          done.append(loss)
          del open_[who]
  end = max((record["time"] for record in part), default=0.0)
  done += [
    loss._replace(length=end - loss.time, ended=False)
    for loss in open_.values()
  ]
  up += sum(end - since for since in joined.values())
  return sorted(done, key=lambda loss: loss.time), up


def downtimes(losses: Sequence[Loss]) -> tuple[float, ...]:
  """As many equally likely lengths of absences.

  A loss that had not ended with the journal says only that it took longer than
  that. It is left out, unless it is at least as long as all that have ended.

  Example:
    >>> lost = Loss(0, time=0.0, unnoticed=0.0, length=5.0)
    >>> downtimes([lost, lost, lost._replace(length=1.0, ended=False)])
    (5.0, 5.0)
  """
  longest = max((loss.length for loss in losses if loss.ended), default=0.0)
  return tuple(
    max(loss.length, ROUNDING)
    for loss in losses
    if loss.ended or loss.length >= longest
  )
