"""The journal's line of a step, formatted directly as text.

There is one per step, so it skips the objects that `journal.Journal` would
check and encode: that takes a quarter of the time.
"""

from __future__ import annotations

import json
import math
from typing import Any

from optax_dist.coordinator.protocol import entries, notes
from optax_dist.coordinator.runtime import timings

# Times have `journal.DECIMALS` digits; a weight is exact, for replay.
_LINE = (
  '{"kind": "commit", "time": %.6f, "step": %d, "term": %d,'
  ' "attempt": %d, "attempt_time": %s, "members": [%s]}'
)
_MEMBER = (
  '{"replica": %s, "incarnation": %d, "local_step": %d, "count": %d,'
  ' "weight": %r, "staleness": %d, "data": %s, "batches": %s, "compute": %s,'
  ' "arrived": %s, "timings": %s}'
)
_TIMINGS = (
  '{"start": %.6f, "sent": %.6f, "compiled": %.6f, "cpu": %.6f,'
  ' "encoded": %.6f, "waited": %.6f, "exchanged": %.6f, "applied": %.6f,'
  ' "bytes_in": %d, "bytes_out": %d}'
)
_encode = json.JSONEncoder(allow_nan=False).encode
# How deep lists may be nested in each other. Python's limit depends on the caller,
# so what one function can read, another could fail to write.
_DEEPEST = 50
# Usually no batch was named.
_BATCHES = {"": "null", "[null]": "[null]"}


def line(note: notes.StepCommitted, now: float, clocks: timings.Clocks) -> str:
  """The line, as JSON with all fields of its kind.

  Args:
    note: the leader's note.
    now: time of the note, in seconds since the run's start.
    clocks: the replicas' clocks.
  """
  commit = note.commit
  # Commits of an earlier leader have no timings.
  raw = note.timings or (b"",) * len(commit.parts)
  members = [
    _member(part, details, one, now, clocks)
    for part, details, one in zip(
      commit.parts, commit.details, raw, strict=True
    )
  ]
  began = _seconds(ago(now, note.age))
  id_ = commit.attempt
  told = ", ".join(members)
  return _LINE % (now, id_.step, id_.term, id_.number, began, told)


def _member(
  part: entries.Part,
  details: entries.Details,
  raw: bytes,
  now: float,
  clocks: timings.Clocks,
) -> str:
  arrived = ago(now, details.age)
  told = "null"
  found = timings.Timings.unpack(raw) if raw else None
  if found is not None and arrived is not None:
    aligned = clocks.align(part.incarnation, found, arrived)
    told = "null" if aligned is None else _TIMINGS % aligned
  replica = part.replica
  known = _BATCHES.get(details.batches)
  return _MEMBER % (
    replica if type(replica) is int else _encode(replica),
    part.incarnation,
    part.local_step,
    part.count,
    part.weight,
    part.staleness,
    _encode(part.data) if part.data else "null",
    known or _encode(batches(details.batches)),
    _seconds(details.compute),
    _seconds(arrived),
    told,
  )


def ago(now: float, age: float | None) -> float | None:
  """When something was that is so many seconds old; None if unknown."""
  return None if age is None else max(0.0, now - age)


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


def _seconds(number: float | None) -> str:
  return "null" if number is None else f"{number:.6f}"
