"""The journal: nothing written is lost, and nothing bad goes unsaid."""

import json
import os
import sys
import time

import numpy as np
import pytest
import run_journals
from hypothesis import given
from hypothesis import strategies as st

from optax_dist.coordinator import journal


class Clock:
  """A clock that one sets."""

  def __init__(self, now=100.0):
    self.now = now

  def __call__(self):
    return self.now


def _member(replica, **fields):
  return {
    "replica": replica,
    "incarnation": 0,
    "local_step": 0,
    "staleness": 0,
    "count": 1,
    "weight": 1.0,
    "batches": f"[{replica}]",
    "compute": 0.25,
    "age": 0.5,
  } | fields


def written_at(path, ago):
  """Sets when a file was last written, in seconds before now."""
  then = time.time() - ago
  os.utime(path, (then, then))


@pytest.fixture
def path(tmp_path):
  return tmp_path / "run.jsonl"


def test_written_records_are_read_back(path, monkeypatch):
  clock = Clock()
  monkeypatch.setattr(time, "time", Clock(5.0))
  with journal.Journal(path, clock=clock) as writer:
    writer.write("run", strategy="sync_replicas", step=0, config={"a": [1]})
    clock.now += 1.23456789
    weight = 1 / 3
    members = [_member(0, weight=weight), _member("b", age=0.12345678)]
    writer.write("commit", step=0, round=1, members=members, more="kept")
    # A line is on disk before write returns.
    assert path.read_text().count("\n") == 2
  (run, commit), problems = journal.read(path)
  assert not problems
  assert run["time"] == 0.0
  assert run["unix_time"] == 5.0
  assert run["version"] == journal.VERSION
  assert run["config"] == {"a": [1]}
  assert commit["time"] == 1.234568
  assert commit["epoch"] is None
  assert commit["more"] == "kept"
  assert commit["members"][0]["weight"] == weight
  assert commit["members"][1]["age"] == 0.123457


@pytest.mark.parametrize(
  ("kind", "fields", "said"),
  [
    ("jump", {}, "kind must be one of run, coordinator"),
    ("join", {"replica": 0}, "join: .* required field `step`"),
    (
      "join",
      {"replica": 0.5, "step": 0},
      "Expected `int . str`, got `float` - at `..replica`",
    ),
    (
      "join",
      {"replica": 0, "step": True},
      "Expected `int`, got `bool` - at `..step`",
    ),
    ("stall", {"step": 0, "waited": float("nan"), "missing": {}}, "waited"),
    ("commit", {"step": 0, "round": 1, "members": [3]}, r"members\[0\]"),
    (
      "commit",
      {"step": 0, "round": 1, "members": [_member(0), {"replica": 1}]},
      r"required field `local_step` - at `\$.members\[1\]`",
    ),
  ],
)
def test_a_bad_record_is_not_written(path, kind, fields, said):
  with journal.Journal(path) as writer:
    with pytest.raises(ValueError, match=said):
      writer.write(kind, **fields)
    with pytest.raises(TypeError, match="none of JSON's"):
      writer.write("join", replica=0, step=0, config=object())
  assert path.read_bytes() == b""


def test_numpy_values_become_plain_numbers(path):
  with journal.Journal(path) as writer:
    writer.write(
      "join", replica=np.int64(3), step=np.int32(1), keys=np.arange(2)
    )
  (record,) = journal.read(path).records
  assert (record["replica"], record["keys"]) == (3, [0, 1])


def test_a_half_written_line_spoils_only_itself(path):
  with journal.Journal(path) as writer:
    writer.write("run", strategy="sync_replicas", step=0)
  with path.open("a") as file:
    file.write('{"kind": "join", "ti')
  cut = journal.read(path)
  (problem,) = cut.problems
  assert problem.startswith("line 2: ")
  assert "cut short" in problem
  with journal.Journal(path) as writer:
    writer.write("join", replica=1, step=0)
    writer.write("join", replica=2, step=0)
  records, problems = journal.read(path)
  assert [r.get("replica") for r in records] == [None, 1, 2]
  assert [p.split(":")[0] for p in problems] == ["line 2"]


_GOOD = {"kind": "join", "time": 0.5, "replica": 0, "incarnation": 0, "step": 0}
_RUN = {
  "kind": "run",
  "time": 0.0,
  "version": 1,
  "strategy": "sync_replicas",
  "step": 0,
}


@pytest.mark.parametrize(
  ("line", "said"),
  [
    (b"[1, 2]", "not a JSON object but '[1, 2]'"),
    (b'"%s"' % ("é" * 30).encode(), f"object but '\"{'é' * 19}'"),
    (b'{"kind": 3, "time": 1}', "no kind"),
    (b'{"kind": "future", "time": 1e999}', "at `$.time`"),
    (b'{"kind": "future", "time": -1%s}' % (b"0" * 400), "out of range"),
    (b'{"kind": "join", "time": 1, "step": 0}', "required field `replica`"),
    (b'{"kind": "future", "time": "soon"}', "Expected `float`, got `str`"),
    (b'{"kind": "future", "time": NaN}', "NaN is no JSON number"),
    (b"\xff\xfe", "not UTF-8"),
    (b"[" * 100_000, "not JSON"),
    (json.dumps(_GOOD | {"step": "1"}).encode(), "got `str` - at `$.step`"),
  ],
)
def test_a_bad_line_is_named_and_the_rest_is_kept(path, line, said):
  run, good = json.dumps(_RUN).encode(), json.dumps(_GOOD).encode()
  path.write_bytes(b"\n".join([run, good, line, b"", good]) + b"\n")
  records, problems = journal.read(path)
  assert [r["kind"] for r in records] == ["run", "join", "join"]
  (problem,) = problems
  assert problem.startswith("line 3: ")
  assert said in str(problem)


@given(st.lists(st.binary(max_size=30), max_size=5), st.integers(0, 5))
def test_reader_survives_any_garbage(tmp_path_factory, garbage, at):
  path = tmp_path_factory.mktemp("garbage") / "run.jsonl"
  good = [json.dumps(_RUN).encode()] + [json.dumps(_GOOD).encode()] * 5
  lines = [*good[: at + 1], *garbage, *good[at + 1 :]]
  path.write_bytes(b"\n".join(lines))
  records, problems = journal.read(path)
  assert [r["kind"] for r in records].count("join") >= 5
  blank = b"\n".join(garbage).split(b"\n") if garbage else []
  assert len(problems) == sum(bool(line.strip()) for line in blank)


def test_unknown_kinds_are_kept_and_newer_versions_reported(path):
  lines = [_RUN | {"version": 2}, {"kind": "comet", "time": 1.0, "tail": 3}]
  path.write_text("\n".join(map(json.dumps, lines)))
  records, problems = journal.read(path)
  assert {name: records[0][name] for name in lines[0]} == lines[0]
  assert records[1:] == lines[1:]
  assert [str(p) for p in problems] == ["line 1: version 2, where 1 is known"]


def test_a_journal_begins_with_a_run(path):
  path.write_text("")
  assert "begin with a run" in str(journal.read(path).problems[0])
  path.write_text(json.dumps(_GOOD))
  records, problems = journal.read(path)
  assert records == [_GOOD | {"address": None}]
  assert "begin with a run" in str(problems[0])


def test_a_new_coordinator_continues_the_time(path):
  with journal.Journal(path, clock=Clock(7.0)) as first:
    first.write("run", strategy="sync_replicas", step=0)
  began = time.monotonic()
  written_at(path, ago=3.0)
  with journal.Journal(path, clock=Clock(1.0)) as second:
    second.write("coordinator", epoch=2, step=0)
    paused = time.monotonic() - began
    second.write("run", strategy="sync_replicas", step=4)
  parts = journal.segments(run_journals.whole(path))
  assert [[r["kind"] for r in part] for part in parts] == [
    ["run", "coordinator"],
    ["run"],
  ]
  # A file system's clock may have coarse ticks.
  assert 2.0 < parts[0][1]["time"] < 4.0 + paused
  assert parts[1][0]["time"] == 0.0


def test_time_does_not_go_back_with_the_wall_clock(path):
  with journal.Journal(path, clock=Clock(0.0)) as first:
    first.write("run", strategy="sync_replicas", step=0)
    first.write("join", replica=0, step=0, time=9.0)
  written_at(path, ago=-3600.0)
  with journal.Journal(path, clock=Clock(0.0)) as second:
    assert second.time() == 9.0


def test_missing_fields_are_unknown():
  record, wrong = journal.parse(
    b'{"kind": "run", "time": 0, "version": 1, "strategy": "s", "step": 0}'
  )
  assert not wrong
  assert record["unix_time"] is None
  member = (
    b'{"replica": 0, "local_step": 0, "count": 1, "staleness": 0, "weight": 1}'
  )
  record, wrong = journal.parse(
    b'{"kind": "commit", "time": 1, "step": 0, "round": 0, "members": ['
    + member
    + b"]}"
  )
  assert not wrong
  assert record["members"][0]["compute"] is None
  assert record["epoch"] is None


@pytest.mark.parametrize(
  ("text", "found"),
  [
    (None, []),
    ('[3, {"a": [1.5, null]}]', [3, {"a": [1.5, None]}]),
    ("[3", []),
    ("[3] [4]", []),
    ("[" * 100_000, []),
    ("7", []),
    ('{"a": 1}', []),
  ],
)
def test_batches_are_a_list_in_json_or_none(text, found):
  """They are other processes' texts."""
  assert journal.batches({"batches": text}) == found


def test_only_a_regular_file_is_a_journal(tmp_path):
  pipe = tmp_path / "pipe"
  os.mkfifo(pipe)
  for path in ("/dev/zero", pipe):
    with pytest.raises(OSError, match="regular file"):
      journal.Journal(path)


def _lines(*records):
  return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def _commit(step, replicas=2):
  members = [_member(replica) for replica in range(replicas)]
  return {"kind": "commit", "time": 1.0, "step": step, "round": 1} | {
    "members": members
  }


def _join(step=0, size=0):
  return _GOOD | {"step": step, "address": "x" * size}


def _step(path):
  with journal.Journal(path) as opened:
    return opened.step


_LONG = 3 << 20  # Far more than is read first.


def test_a_long_journal_is_continued_by_its_end(path, monkeypatch):
  """A new coordinator would be silent for as long as it reads."""
  steps = 20_000
  path.write_bytes(_lines(_RUN, *map(_commit, range(steps))))
  parse, parsed = journal.parse, []

  def counted(line):
    parsed.append(len(line))
    return parse(line)

  monkeypatch.setattr(journal, "parse", counted)
  assert _step(path) == steps - 1
  assert sum(parsed) < path.stat().st_size / 4
  parsed.clear()
  journal.add(path, "process", replica=1, host="h", pid=7, ended=None)
  assert sum(parsed) < path.stat().st_size / 4


@pytest.mark.parametrize(
  ("records", "step"),
  [
    ([], -1),
    ([_RUN], -1),
    ([_RUN | {"step": 7}], 6),
    ([_RUN, _commit(0), _commit(1)], 1),
    # The last commit is far before the end.
    ([_RUN, _commit(0), _commit(1), _join(size=_LONG)], 1),
    ([_RUN, _commit(0), *[_join(size=1000)] * 3000], 0),
    ([_RUN | {"step": 7}, _join(size=_LONG), _join()], 6),
    # The run has begun far before the end.
    ([_RUN | {"step": 7}, _commit(7), _join(size=_LONG), _commit(8)], 8),
    # Steps of an earlier run.
    ([_RUN, *map(_commit, range(9)), _RUN | {"step": 4}], 3),
    ([_RUN, *map(_commit, range(9)), _RUN | {"step": 4}, _commit(4)], 4),
    (
      [_RUN, *map(_commit, range(9)), _RUN | {"step": 4}, _join(size=_LONG)],
      3,
    ),
  ],
)
def test_last_step_of_the_last_run_is_found(path, records, step):
  path.write_bytes(_lines(*records))
  assert _step(path) == step


@pytest.mark.parametrize("size", [0, 10, _LONG])
def test_last_step_is_found_among_broken_lines(path, size):
  garbage = b"\xff" * size
  good = _lines(_RUN, _commit(0), _commit(1))
  path.write_bytes(good + garbage)
  assert _step(path) == 1
  path.write_bytes(garbage + b"\n" + good + b'{"kind": "commit", "ti')
  assert _step(path) == 1
  path.write_bytes(garbage)
  assert _step(path) == -1
  path.write_bytes(garbage + b"\n" + garbage)
  assert _step(path) == -1


def test_a_record_of_many_replicas_is_read_in_few_calls():
  """The coordinator checks each line that it writes, in its event loop."""
  line = _lines(_commit(0, 64))
  calls = []
  sys.setprofile(
    lambda frame, event, argument: calls.append(frame) if event == "call" else 0
  )
  try:
    record, wrong = journal.parse(line)
  finally:
    sys.setprofile(None)
  assert not wrong
  assert record["members"][63]["timings"] is None
  assert len(calls) < 4 * 64


def test_a_record_of_another_process_counts_the_time_since_the_last_one(path):
  with journal.Journal(path) as written:
    written.write("run", strategy="s", step=0)
    written.write("join", replica=1, incarnation=0, step=0, time=2.5)
  written_at(path, ago=60.0)
  journal.add(path, "process", replica=1, host="h", pid=7, ended="was killed")
  assert 62.0 < run_journals.whole(path)[-1]["time"] < 90.0
  with journal.Journal(path) as written:
    assert 62.0 < written.time() < 90.0


def test_record_of_another_process_is_at_least_as_late_as_the_last_one(path):
  process = {"replica": 1, "host": "h", "pid": 7, "ended": None}
  path.write_text("")
  journal.add(path, "process", **process)
  assert path.read_text() == ""  # No run has begun.
  with journal.Journal(path) as written:
    written.write("run", strategy="s", step=0)
    written.write("join", replica=1, incarnation=0, step=0, time=2.5)
    journal.add(path, "process", **process)
    with path.open("ab") as file:
      file.write(b'{"kind": "co')  # A writer that was killed.
    journal.add(path, "process", **process | {"ended": "was ended by SIGKILL"})
    written.write("leave", replica=1, incarnation=0, step=0, time=3.0)
  records, problems = journal.read(path)
  assert [r["kind"] for r in records[1:]] == [
    "join",
    "process",
    "process",
    "leave",
  ]
  assert 2.5 <= records[2]["time"] <= records[3]["time"]
  assert records[3]["ended"] == "was ended by SIGKILL"
  assert len(problems) == 1
