"""Failures and repairs recorded in a journal."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from optax_dist.coordinator import journal
from optax_dist.quorum.events import Replica
from optax_dist.simulate.computations import contributions

# Rounding of times in a journal.
_LEAST = 1e-6


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


class Losses(NamedTuple):
  """All losses of a run.

  Attributes:
    each: the losses, in order of time.
    up: replica-seconds in which a replica was present, and could be lost.
    takeovers: for each change of leader, the extra seconds without a step.
  """

  each: tuple[Loss, ...]
  up: float
  takeovers: tuple[float, ...]


def losses_in(part: Sequence[journal.Record], usual: float) -> Losses:
  """The losses of a run.

  Args:
    part: one of the runs from `journal.segments`.
    usual: seconds that hardly any computation exceeds.
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
    elif kind in ("commit", "drop", "exchange"):
      for gradient in contributions(record):
        who, timings = gradient["replica"], gradient.get("timings")
        last_seen[who] = now
        loss = open_.get(who)
        if loss is None:
          continue
        if record.get("reason") == "lost":
          # Its gradient had arrived: it waited for others, and was not overdue.
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
  losses = tuple(sorted(done, key=lambda loss: loss.time))
  return Losses(losses, up, _takeovers(part))


def downtimes(losses: Sequence[Loss]) -> tuple[float, ...]:
  """As many equally likely lengths as there are losses (Kaplan-Meier).

  A loss that had not ended with the journal says only that it took longer than
  that, so its weight goes to the longer ones. If there are none, it is taken to
  end there (Efron's convention).

  Example:
    >>> lost = Loss(0, time=0.0, unnoticed=0.0, length=5.0)
    >>> downtimes([lost, lost, lost._replace(length=1.0, ended=False)])
    (5.0, 5.0, 5.0)
  """
  # Of equal lengths, the ended one was first.
  order = sorted(losses, key=lambda loss: (loss.length, not loss.ended))
  n = len(order)
  weights = np.full(n, 1 / n)
  for i, loss in enumerate(order[:-1]):
    if not loss.ended:
      weights[i + 1 :] += weights[i] / (n - i - 1)
      weights[i] = 0.0
  at = np.searchsorted(np.cumsum(weights), (np.arange(n) + 0.5) / n)
  return tuple(max(order[i].length, _LEAST) for i in at)


def _takeovers(part: Sequence[journal.Record]) -> tuple[float, ...]:
  commits = [r["time"] for r in part if r["kind"] == "commit"]
  if len(commits) < 2:
    return ()
  gaps = sorted(b - a for a, b in itertools.pairwise(commits))
  usual = gaps[(len(gaps) - 1) // 2]
  seconds = []
  leaders = [r["time"] for r in part if r["kind"] == "leader"][1:]
  for time in leaders:
    before = [t for t in commits if t <= time]
    after = [t for t in commits if t > time]
    if before and after:
      seconds.append(max(0.0, after[0] - before[-1] - usual))
  return tuple(seconds)
