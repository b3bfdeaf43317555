"""The leader's journal: writes its notes as lines of the file.

The line of a step is written by `flush`, after what other replicas wait for has
been sent and before this one continues; all others are written at once.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, TypeAlias

from optax_dist.coordinator import journal
from optax_dist.coordinator.protocol import entries, notes
from optax_dist.coordinator.runtime import commit_lines, timings

_log = logging.getLogger("optax_dist.coordinator")


class Observer(Protocol):
  """Receives the leader's notes in the journal's form."""

  def begin(self, owner: object, records: Iterable[journal.Record]) -> None:
    """The owner leads from now on; the records are earlier ones, if known."""
    ...

  def take(self, line: str) -> None:
    """Takes the journal line of an event."""
    ...

  def end(self, owner: object) -> None:
    """The owner no longer leads."""
    ...


class JournalLines:
  """Writes what the leader notes; a failing file never ends training.

  Attributes:
    pending: whether the line of a step waits for `flush`.
  """

  def __init__(
    self,
    path: str | os.PathLike[str] | None,
    describe: Mapping[str, Any],
    silences: Callable[[], Mapping[str, float]] = dict,
    observer: Observer | None = None,
  ):
    """Creates the writer, without opening the file.

    Args:
      path: the file; None for no journal.
      describe: fields of a run's first line besides its step.
      silences: how long each process may currently be silent.
      observer: receives the same lines.

    Raises:
      ValueError: a field is not a JSON value.
    """
    if path is not None:
      # Otherwise it would fail in the leader's event loop, and end the run.
      for name, value in describe.items():
        journal.check_json(name, value)
    self._path, self._describe = path, describe
    self._silences = silences
    self._deadlines: list[float] = []
    self._file: journal.Journal | None = None
    self._clocks = timings.Clocks()
    self._observer = observer
    self._start = time.monotonic()
    # The last step, and when it was noted.
    self._step: tuple[notes.StepCommitted, float] | None = None
    # The last step whose line another leader has written since `open`.
    self._theirs = -1

  @property
  def pending(self) -> bool:
    return self._step is not None

  def open(self, commits: Sequence[entries.Committed]) -> None:
    """Opens the file, if possible, and writes the commits missing from it."""
    self._theirs = -1
    found: list[journal.Record] = []
    if self._path is not None:
      found = self._open(self._path)
    if self._observer is not None:
      self._observer.begin(self, found)
    if self._file is None:
      return
    last = -1
    for record in found:
      if record["kind"] == "run":
        last = record["step"] - 1
      elif record["kind"] == "commit":
        last = record["step"]
    for commit in commits:
      if commit.attempt.step > last:
        self.write(notes.StepCommitted(commit, None))
    self.flush()

  def _open(self, path: str | os.PathLike[str]) -> list[journal.Record]:
    """Opens the file; returns its records."""
    try:
      self._file = journal.Journal(path)
      return journal.read(path).records
    except (OSError, ValueError) as error:  # ValueError: not a valid name.
      _log.warning(
        "The journal can't be written, and training goes on without it: %s",
        error,
      )
      self._close_file()
      return []

  def write(self, note: notes.Note) -> None:
    """Writes a line, if there is a journal; a step's waits for `flush`."""
    if self._file is None and self._observer is None:
      return
    self.flush()
    if isinstance(note, notes.StepCommitted):
      self._step = note, self._time()
      return
    if isinstance(note, notes.DeadlinesSeen) and not self._changed(note):
      return
    now = self._time()
    kind, fields = self._line(note, now)
    if kind == "run":  # The time restarts.
      self._start, now = time.monotonic(), 0.0
    if self._observer is not None:
      record = {"kind": kind, "time": _rounded(now), **fields}
      self._observer.take(json.dumps(record, default=str))
    if self._file is None:
      return
    try:
      self._file.write(kind, **fields)
    except OSError as error:
      self._give_up(error)

  def flush(self) -> None:
    """Writes the pending line: call it once what others wait for is sent."""
    if self._step is None:
      return
    (note, now), self._step = self._step, None
    line = commit_lines.line(note, now, self._clocks)
    if self._observer is not None:
      self._observer.take(line)
    if self._file is None:
      return
    try:
      # If this process was stopped since it noted the step, another may lead
      # now, and has written the line.
      for record in self._file.news():
        if record["kind"] == "commit":
          self._theirs = max(self._theirs, record["step"])
      if note.commit.attempt.step > self._theirs:
        self._file.append(line)
    except OSError as error:
      self._give_up(error)

  def _give_up(self, error: OSError) -> None:
    _log.warning("The journal can't be written any more: %s", error)
    self._close_file()

  def _time(self) -> float:
    if self._file is not None:
      return self._file.time()
    return time.monotonic() - self._start

  def close(self) -> None:
    """Writes the pending line, and closes the file."""
    self.flush()
    if self._observer is not None:
      self._observer.end(self)
    self._close_file()

  def _close_file(self) -> None:
    if self._file is not None:
      self._file.close()
      self._file = None

  def _line(self, note: _Unhurried, now: float) -> tuple[str, dict[str, Any]]:
    match note:
      case notes.RunBegins(step):
        self._clocks = timings.Clocks()
        return "run", {**self._describe, "step": step}
      case notes.LeaderBegins(replica, term, step):
        return "leader", {"replica": replica, "term": term, "step": step}
      case notes.MemberJoined(replica, incarnation, step, address):
        fields = _member(replica, incarnation, step)
        return "join", fields | {"address": address}
      case notes.MemberRemoved(replica, incarnation, step, left, reason):
        fields = _member(replica, incarnation, step)
        self._clocks.forget(incarnation)
        if left:
          return "leave", fields
        return "lost", fields | {"reason": reason}
      case notes.MemberStuck(replica, incarnation, step, reason, stacks):
        fields = _member(replica, incarnation, step)
        return "stuck", fields | {"reason": reason, "stacks": stacks}
      case notes.GradientDropped():
        fields = _member(note.replica, note.incarnation, note.step)
        arrived = commit_lines.ago(now, note.age)
        return "drop", fields | {
          "local_step": note.local_step,
          "count": note.count,
          "reason": note.reason,
          "batches": commit_lines.batches(note.batches),
          "compute": note.compute,
          "arrived": arrived,
          "timings": self._timings(note.incarnation, note.timings, arrived),
        }
      case notes.AttemptAbandoned(step, attempt, failed_replica, reason):
        return "abandon", {
          "step": step,
          "attempt": attempt,
          "failed_replica": failed_replica,
          "reason": reason,
        }
      case notes.StepStalled(step, waited, computing, reporting, absent):
        missing = {
          "computing": list(computing),
          "reporting": list(reporting),
          "absent": list(absent),
        }
        return "stall", {"step": step, "waited": waited, "missing": missing}
      case notes.CannotProceed():
        return "cannot_proceed", {
          "step": note.step,
          "have": note.have,
          "needed": note.needed,
          "missing": list(note.missing),
          "final": note.final,
        }
      case notes.FingerprintSeen(step, replica, digest):
        params, _, state = digest.partition("-")
        return "fingerprint", {
          "step": step,
          "replica": replica,
          "params": params,
          "state": state,
        }
      case notes.DeadlinesSeen(known):
        return "deadlines", {"silence": self._silence(known)}
      case notes.RunEnds():
        ledger = {"applied": note.applied, "dropped": dict(note.dropped)}
        return "finish", {
          "step": note.step,
          "reason": note.reason,
          "ledger": None if note.error else ledger,
          "load": _load(),
        }

  def _silence(self, members: Sequence[tuple[Any, str]]) -> dict[str, float]:
    silences = self._silences()
    return {
      str(replica): silences[process]
      for replica, process in members
      if process in silences
    }

  def _changed(self, note: notes.DeadlinesSeen) -> bool:
    """Whether deadlines differ enough from those last written."""
    found = list(self._silence(note.members).values())
    old, same = self._deadlines, len(found) == len(self._deadlines)
    if same and all(
      abs(a - b) <= 0.1 * b for a, b in zip(found, old, strict=True)
    ):
      return False
    self._deadlines = found
    return True

  def _timings(
    self, incarnation: int, raw: bytes, arrived: float | None
  ) -> dict[str, Any] | None:
    found = timings.Timings.unpack(raw)
    if found is None or arrived is None:
      return None
    aligned = self._clocks.align(incarnation, found, arrived)
    if aligned is None:
      return None
    return {key: _rounded(x) for key, x in aligned._asdict().items()}


# All notes except that of a step.
_Unhurried: TypeAlias = (
  notes.RunBegins
  | notes.LeaderBegins
  | notes.MemberJoined
  | notes.MemberRemoved
  | notes.MemberStuck
  | notes.GradientDropped
  | notes.AttemptAbandoned
  | notes.StepStalled
  | notes.CannotProceed
  | notes.FingerprintSeen
  | notes.DeadlinesSeen
  | notes.RunEnds
)


def _member(replica: Any, incarnation: int, step: int) -> dict[str, Any]:
  return {"replica": replica, "incarnation": incarnation, "step": step}


def _load() -> float | None:
  """The average number of running or waiting programs in the last minute."""
  try:
    return os.getloadavg()[0]
  except (AttributeError, OSError):  # Not available on every system.
    return None


def _rounded(seconds: float | None) -> float | None:
  return None if seconds is None else round(seconds, journal.DECIMALS)
