"""The journal's records, from the notes of the leader.

    notes.Note  ->  Records.make  ->  {"kind": ..., "time": ..., fields}

Most notes are the record. Here are added: the time of the run, on which ages
and the members' own clocks are expressed; what the members reported as text or
bytes, if it can be read; and what only this process knows: its options, the
load of its host.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from typing import Any

import msgspec

from optax_dist.coordinator import journal
from optax_dist.coordinator.protocol import entries, notes
from optax_dist.coordinator.runtime import timings

# How deep lists may be nested in each other. Python's limit depends on the caller,
# so what one function can read, another could fail to write.
_DEEPEST = 50


class Records:
  """Makes the records of one leader's notes.

  Example:
    >>> Records({}).make(notes.Leader(3, 20, 1), 2.5)
    {'kind': 'leader', 'time': 2.5, 'replica': 3, 'step': 20, 'term': 1}
  """

  def __init__(self, describe: Mapping[str, Any]):
    """Creates it for a run.

    Args:
      describe: fields of a run's first record besides its step.
    """
    self._describe = describe
    self._clocks = timings.Clocks()

  def make(self, note: notes.Note, now: float) -> journal.Record:
    """The record of a note.

    Args:
      note: the leader's note.
      now: the time, in seconds since the run's start.
    """
    fields: dict[str, Any]
    match note:
      case notes.RunBegins(step):
        self._clocks = timings.Clocks()
        fields = {"kind": "run", **self._describe, "step": step}
      case notes.StepCommitted():
        fields = {"kind": "commit", **self._commit(note, now)}
      case notes.GradientDropped():
        fields = {
          "kind": "drop",
          "step": note.step,
          "replica": note.replica,
          "local_step": note.local_step,
          "reason": note.reason,
          **self._gradient(note, note, note.timings, now),
        }
      case notes.Finish():
        fields = _plain(note) | {"load": _load()}
      case _:
        if isinstance(note, notes.Leave | notes.Lost):
          self._clocks.forget(note.incarnation)
        fields = _plain(note)
    return {"kind": fields.pop("kind"), "time": _rounded(now), **fields}

  def _commit(self, note: notes.StepCommitted, now: float) -> dict[str, Any]:
    commit, attempt = note.commit, note.commit.attempt
    # Commits of an earlier leader have no timings.
    told = note.timings or (None,) * len(commit.parts)
    members = [
      {
        "replica": part.replica,
        "local_step": part.local_step,
        "weight": part.weight,
        "staleness": part.staleness,
        "data": [list(span) for span in part.data] or None,
        **self._gradient(part, details, one, now),
      }
      for part, details, one in zip(
        commit.parts, commit.details, told, strict=True
      )
    ]
    return {
      "step": attempt.step,
      "term": attempt.term,
      "attempt": attempt.number,
      "attempt_time": _ago(now, note.age),
      "members": members,
      "skipped": [list(span) for span in commit.skipped] or None,
    }

  def _gradient(
    self,
    part: entries.Part | notes.GradientDropped,
    details: entries.Details | notes.GradientDropped,
    measured: notes.Timings | None,
    now: float,
  ) -> dict[str, Any]:
    """What a member has reported of its gradient."""
    arrived = _ago(now, details.age)
    aligned, times = None, None
    if measured is not None and arrived is not None:
      aligned = self._clocks.align(part.incarnation, measured, arrived)
    if aligned is not None:
      found = msgspec.structs.asdict(aligned)
      times = {key: round(x or 0, journal.DECIMALS) for key, x in found.items()}
    return {
      "incarnation": part.incarnation,
      "count": part.count,
      "batches": batches(details.batches),
      "compute": _rounded(details.compute),
      "arrived": arrived,
      "timings": times,
    }


def batches(text: str) -> list[Any] | None:
  """The batches that a member reported; None if the text is no list in JSON.

  Example:
    >>> batches("[3, null]"), batches("[NaN]")
    ([3, None], None)
  """
  try:
    found = _decode(text) if text else None
  except (ValueError, RecursionError):
    return None
  if type(found) is not list or _is_too_deep(found):
    return None
  return found


def _is_too_deep(found: list[Any]) -> bool:
  level: list[Any] = [found]
  for _ in range(_DEEPEST):
    level = [
      part
      for one in level
      for part in (one.values() if type(one) is dict else one)
      if type(part) in (list, dict)
    ]
  return bool(level)


def _finite(text: str) -> float:
  number = float(text)  # "1e999" is JSON, and too large.
  if not math.isfinite(number):
    raise ValueError(f"{text} is no finite number")
  return number


# NaN and Infinity are none of JSON's numbers.
_decode = json.JSONDecoder(parse_float=_finite, parse_constant=_finite).decode


def _plain(note: notes.Record) -> dict[str, Any]:
  found: dict[str, Any] = msgspec.to_builtins(note)
  return found


def _ago(now: float, age: float | None) -> float | None:
  """When something was that is so many seconds old; None if unknown."""
  return None if age is None else _rounded(max(0.0, now - age))


def _rounded(seconds: float | None) -> float | None:
  return None if seconds is None else round(seconds, journal.DECIMALS)


def _load() -> float | None:
  """The average number of running or waiting programs in the last minute."""
  try:
    return os.getloadavg()[0]
  except (AttributeError, OSError):  # Not available on every system.
    return None
