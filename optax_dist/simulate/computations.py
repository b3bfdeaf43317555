"""A journal as computations: when each began, and after which event."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from optax_dist.coordinator import journal
from optax_dist.quorum.events import Replica


class Computation(NamedTuple):
  """One computation of a replica.

  Attributes:
    replica: its id.
    compute: seconds, without compile time.
    gradients: number of gradients summed in it.
    arrived: when the coordinator received it; if that is unknown, when it was part of a
      step.
    since: the event it follows: the last arrival of a step that the replica
      took part in, or that of a dropped gradient; None if it is unknown, or if
      the replica joined in between.
    ready: when the newest parameters were available, except for communication:
      the last arrival of their step.
    delay: seconds from `since` until it began, as seen by the coordinator, messages
      included; None if unknown.
    after_commit: whether it follows a step, rather than a dropped gradient.
    compiled: seconds of compiling; None if unknown.
  """

  replica: Replica
  compute: float
  gradients: int
  arrived: float
  since: float | None
  ready: float | None
  delay: float | None
  after_commit: bool
  compiled: float | None


def contributions(record: journal.Record) -> Sequence[journal.Record]:
  """The members of a commit; a drop; none of other records."""
  if record["kind"] == "commit":
    return record["members"]
  return (record,) if record["kind"] == "drop" else ()


def of(part: Sequence[journal.Record]) -> Iterator[Computation]:
  """The computations of a run whose times are known, in order of arrival.

  Args:
    part: one of the runs from `journal.segments`.
  """
  # The event that each replica's next computation follows: the minimum step, the time,
  # whether it was a commit, and the end of the last step by then.
  follows: dict[Replica, tuple[int, float | None, bool, float | None]] = {}
  ready: float | None = None
  for record in part:
    gradients = contributions(record)
    for gradient in gradients:
      replica = gradient["replica"]
      arrived = journal.arrived(record, gradient)
      step, end, after_commit, before = follows.pop(
        replica, (0, None, False, None)
      )
      compute, count = gradient.get("compute"), gradient.get("count", 1)
      if compute is not None and count > 0:
        delay = None
        known = end is not None and arrived is not None
        if known and gradient["local_step"] >= step:
          delay = arrived - compute - end
        timings = gradient.get("timings")
        compiled = None
        if timings is not None:
          compiled = min(timings["compiled"], compute)
        yield Computation(
          replica,
          compute - (compiled or 0.0),
          count,
          record["time"] if arrived is None else arrived,
          end,
          before,
          delay,
          after_commit,
          compiled,
        )
      if record["kind"] == "drop" and arrived is not None:
        follows[replica] = record["step"], arrived, False, ready
    last = _last_arrival(record)
    if record["kind"] == "commit" and last is not None:
      ready = last
      for gradient in gradients:
        follows[gradient["replica"]] = record["step"] + 1, ready, True, ready
    elif record["kind"] in ("join", "lost", "leave"):
      follows.pop(record["replica"], None)


def ends(part: Sequence[journal.Record]) -> list[float]:
  """When each step of a run had all it needed: its last arrival."""
  times = []
  for record in part:
    if record["kind"] == "commit":
      last = _last_arrival(record)
      times.append(record["time"] if last is None else last)
  return times


def _last_arrival(record: journal.Record) -> float | None:
  arrivals = [journal.arrived(record, g) for g in contributions(record)]
  return max((at for at in arrivals if at is not None), default=None)
