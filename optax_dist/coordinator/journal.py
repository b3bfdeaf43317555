"""The journal of a run: one line of JSON per event.

The coordinator writes it; replay, plots and the simulator read it. docs/simulate.md
describes the records. Times are seconds since the run's start, on the writer's
clock.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import time as _time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec

from optax_dist.coordinator._internal import files
from optax_dist.coordinator.protocol import journal_events
from optax_dist.coordinator.protocol.codec import Finite

VERSION = journal_events.VERSION

Record = dict[str, Any]

# The kinds of records.
KINDS = journal_events.RECORDS
#: The time spent on a contribution, if its replica reported it.
TIMINGS = journal_events.Timings.__struct_fields__
_SECONDS = frozenset({"time", "age", "compute", "waited", *TIMINGS})
# The decimals to which these are rounded.
_DECIMALS = 6
# Bytes at the end of a file that are read first, to continue its run.
_END = 1 << 20
#: Beside the journal, where a job is on several hosts: the address of the
#: coordinator, on whose host the journal is.
WRITER = "coordinator.address"
_AS_THEY_ARE = frozenset({str, int, bool, type(None)})


class Contents(NamedTuple):
  """A journal's contents, as `read` returns them.

  Attributes:
    records: the valid lines, in order, as parsed JSON.
    problems: the errors of invalid lines, each with the line's number, from 1.
  """

  records: list[Record]
  problems: list[str]


class Journal:
  """Appends records to a file, each immediately, so that none is ever lost.

  A line that a killed writer left incomplete is terminated first, so that it
  doesn't corrupt the next. A coordinator that starts again continues the run's
  time, by the clock of the file system.

  Attributes:
    path: the file.
    begun: whether it has a run.
    step: the last committed step of its last run.
    ended: whether it has the end of that run.

  Example:
    >>> import tempfile
    >>> path = pathlib.Path(tempfile.mkdtemp(), "run.jsonl")
    >>> with Journal(path) as journal:
    ...   journal.write("run", strategy="sync_replicas", step=0)
    ...   journal.write("join", replica=0, incarnation=0, step=0)
    >>> [record["kind"] for record in read(path).records]
    ['run', 'join']
  """

  def __init__(
    self,
    path: str | os.PathLike[str],
    *,
    clock: Callable[[], float] = _time.monotonic,
  ):
    """Opens the file, and keeps its content.

    Args:
      path: the file; it is created if it is missing.
      clock: a monotonic clock, in seconds.

    Raises:
      OSError: it cannot be written, or it is a device or a pipe, which cannot
        be appended to.
    """
    self.path = pathlib.Path(path)
    files.check_regular(path)
    self._clock = clock
    self._file = self.path.open("a+b", buffering=0)
    records = _last_records(self._file)
    self._start = clock() - _now(self._file, records)
    self.begun, self.step, self.ended = False, -1, False
    for record in records:
      self._note(record)

  @property
  def is_gone(self) -> bool:
    """Whether the file has been deleted, moved or emptied."""
    file = self._file.fileno()
    is_empty = self.begun and not os.fstat(file).st_size
    return is_empty or not files.is_at(self.path, file)

  def time(self) -> float:
    """Seconds since the run's start."""
    return self._clock() - self._start

  def write(self, kind: str, /, ago: float = 0.0, **fields: Any) -> None:
    """Appends a record.

    Optional fields that are not given become null. A `run` record restarts the
    time at 0.

    Args:
      kind: a key of `KINDS`.
      ago: seconds since it happened.
      **fields: those of that kind, and any others; `time` is that unless it is
        given.

    Raises:
      ValueError: the kind is unknown, a field is missing or invalid, or the
        journal is closed.
      TypeError: a value has no JSON representation.
      OSError: it cannot be written.
    """
    if kind not in KINDS:
      raise ValueError(f"kind must be one of {', '.join(KINDS)}, got {kind!r}.")
    if kind == "run":
      self._start = self._clock() - ago
      began = {"version": VERSION, "unix_time": _time.time() - ago}
      fields = began | fields
    now = max(0.0, self.time() - ago)
    record = {"kind": kind, "time": fields.pop("time", now)} | fields
    record = {key: _as_json(item, key) for key, item in record.items()}
    wrong = _fault(record)
    if wrong:
      raise ValueError(f"{kind}: {wrong}.")
    _append(self._file, record)
    self._note(record)

  def _note(self, record: Record) -> None:
    self.begun, self.ended = True, record["kind"] == "finish"
    if record["kind"] == "run":
      self.step = record["step"] - 1
    elif record["kind"] == "commit":
      self.step = record["step"]

  def close(self) -> None:
    """Closes the file."""
    self._file.close()

  def __enter__(self) -> Journal:
    return self

  def __exit__(self, *exception: object) -> None:
    self.close()


def _append(file: io.FileIO, record: Record) -> None:
  line = _encode(record).encode() + b"\n"
  end = file.seek(0, os.SEEK_END)
  if end and os.pread(file.fileno(), 1, end - 1) != b"\n":
    line = b"\n" + line
  while line:
    line = line[file.write(line) or 0 :]


def _last_records(file: io.FileIO) -> list[Record]:
  """The last records of a file's last run, one of them a commit if it has any."""
  size, length = file.seek(0, os.SEEK_END), _END
  while True:
    file.seek(max(0, size - length))
    # The first line may be cut off, and is then invalid.
    parsed = (parse(line)[0] for line in file.read().split(b"\n"))
    records = [record for record in parsed if record is not None]
    if length >= size or any(r["kind"] in ("run", "commit") for r in records):
      return [[], *segments(records)][-1]
    length *= 2


def _now(file: io.FileIO, records: list[Record]) -> float:
  """The time of the run whose last records these are; 0 if there are none."""
  if not records:
    return 0.0
  # Both times are of one clock, that of the file system. The hosts' own may be
  # hours apart.
  written = os.fstat(file.fileno()).st_mtime
  with contextlib.suppress(OSError):
    os.utime(file.fileno())
  since = max(0.0, os.fstat(file.fileno()).st_mtime - written)
  return max(record["time"] for record in records) + since


def read(path: str | os.PathLike[str]) -> Contents:
  """Reads a journal, tolerating invalid lines.

  Unknown kinds and fields are kept: a later version may have more.

  Args:
    path: the file.

  Returns:
    The valid records, and the problems of the other lines. A valid line of
    another journal version is both kept and reported as a problem.

  Raises:
    OSError: the file cannot be read.
  """
  records: list[Record] = []
  problems: list[str] = []
  text = pathlib.Path(path).read_bytes()
  *lines, rest = text.split(b"\n")
  if rest:
    lines.append(rest)
  for number, line in enumerate(lines, 1):
    if not line.strip():
      continue
    record, wrong = parse(line)
    if record is None and number == len(lines) and rest:
      wrong += "; it is the last, and was cut short"
    if wrong:
      problems.append(f"line {number}: {wrong}")
    if record is not None:
      records.append(record)
  if not records or records[0]["kind"] != "run":
    problems.insert(0, "line 1: the journal does not begin with a run")
  return Contents(records, problems)


def add(path: str | os.PathLike[str], kind: str, /, **fields: Any) -> None:
  """Appends a record of another process than the coordinator.

  Its time continues the run's as that of a coordinator that starts again does. Nothing
  happens before a run has begun.

  Args:
    path: the file.
    kind: the kind of record, such as ``process``.
    **fields: its fields.

  Raises:
    OSError: it cannot be read or written.
  """
  files.check_regular(path)
  with pathlib.Path(path).open("a+b", buffering=0) as file:
    records = _last_records(file)
    if records:
      now = round(_now(file, records), _DECIMALS)
      _append(file, {"kind": kind, "time": now} | fields)


def segments(records: Iterable[Record]) -> list[list[Record]]:
  """Splits a journal into runs; a resumed job has several with separate times.

  Example:
    >>> [len(part) for part in segments(
    ...   [{"kind": "run"}, {"kind": "join"}, {"kind": "run"}])]
    [2, 1]
  """
  parts: list[list[Record]] = []
  for record in records:
    if record["kind"] == "run" or not parts:
      parts.append([])
    parts[-1].append(record)
  return parts


def arrived(record: Record, gradient: Record) -> float | None:
  """When a gradient of a record arrived at the coordinator; None if unknown.

  Args:
    record: a commit or drop.
    gradient: the record, or one of its members.

  Example:
    >>> arrived({"kind": "commit", "time": 2.5}, {"age": 0.5})
    2.0
  """
  age = gradient.get("age")
  return None if age is None else max(0.0, record["time"] - age)


def batches(gradient: Record) -> list[Any]:
  """The labels that a replica gave its data; empty if they are no list in JSON.

  Args:
    gradient: a drop, or a member of a commit.

  Example:
    >>> batches({"batches": "[3, null]"}), batches({"batches": None})
    ([3, None], [])
  """
  try:
    decoded = json.loads(gradient["batches"] or "[]")
  except (ValueError, RecursionError):
    return []
  return decoded if isinstance(decoded, list) else []


def to_json(name: str, value: Any) -> str:
  """A value as JSON text, as a record has it.

  Args:
    name: name of the value, for the message.
    value: a JSON value; numbers and arrays may be those of NumPy and JAX.

  Raises:
    ValueError: it is not a JSON value, or contains one that is not.

  Example:
    >>> to_json("batch", [3, None])
    '[3, null]'
    >>> to_json("config", {"tags": {"a"}})
    Traceback (most recent call last):
      ...
    ValueError: config must be a JSON value: {'a'} is none of JSON's values.
  """
  try:
    return _encode(value)
  except (TypeError, ValueError, RecursionError) as error:
    raise ValueError(f"{name} must be a JSON value: {error}") from None


def parse(line: bytes) -> tuple[Record | None, str]:
  """Parses a line; returns the record or None, and what is wrong with it.

  Missing optional fields become null, as in `write`.
  """
  try:
    text = line.decode("utf-8")
    record = json.loads(text, parse_constant=_no_constant)
  except UnicodeDecodeError:
    return None, "not UTF-8 text"
  except (ValueError, RecursionError) as error:
    return None, f"not JSON ({error})"
  if type(record) is not dict:
    return None, f"not a JSON object but {text[:20]!r}"
  wrong = _fault(record)
  if wrong:
    return None, wrong
  if record["kind"] == "run" and record["version"] != VERSION:
    return record, f"version {record['version']}, where {VERSION} is known"
  return record, ""


def _no_constant(name: str) -> None:
  raise ValueError(f"{name} is no JSON number")


def _fault(record: Record) -> str:
  """What is wrong with a record; if nothing is (""), it is filled with nulls."""
  if type(record.get("kind")) is not str:
    return "no kind"
  kind = KINDS.get(record["kind"])
  try:
    msgspec.convert(record, _Line)
    if kind is not None:
      msgspec.convert(record, kind)
  except (msgspec.ValidationError, OverflowError) as error:
    return str(error)
  if kind is not None:
    _fill(record, kind)
  for member in record["members"] if kind is journal_events.Commit else ():
    _fill(member, journal_events.Member)
  return ""


class _Line(msgspec.Struct):
  time: Finite


def _fill(record: Record, kind: type[msgspec.Struct]) -> None:
  # `msgspec.structs.fields` tells which are optional, but it takes far longer.
  for name in kind.__struct_fields__:
    record.setdefault(name, None)


def _as_json(value: Any, name: Any = None) -> Any:
  """A value as JSON types; accepts NumPy and JAX scalars and arrays.

  Times are rounded; a weight stays exact because replay multiplies by it.
  """
  kind = type(value)
  if kind is float:
    return round(value, _DECIMALS) if name in _SECONDS else value
  if kind in _AS_THEY_ARE:
    return value
  if isinstance(value, dict):
    return {key: _as_json(item, key) for key, item in value.items()}
  if isinstance(value, (list, tuple)):
    return [_as_json(item) for item in value]
  if hasattr(value, "tolist"):
    return _as_json(value.tolist(), name)
  for plain in (str, int, float):
    if isinstance(value, plain):
      return plain(value)
  raise TypeError(f"{value!r:.60} is none of JSON's values.")


_encode = json.JSONEncoder(allow_nan=False, default=_as_json).encode
