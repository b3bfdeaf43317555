"""Reading a journal while it is written."""

import os
import time
import tracemalloc

from optax_dist.cli.runs import journal_tail
from optax_dist.coordinator import journal


def test_only_complete_lines_are_read(tmp_path):
  path = tmp_path / "run.jsonl"
  tail = journal_tail.Tail(path)
  assert list(tail.read()) == []
  with journal.Journal(path) as written:
    written.write("run", strategy="sync_replicas", step=0)
    written.write("coordinator", epoch=0, step=0)
    written.write("join", replica=0, incarnation=0, step=0)
  whole = path.read_bytes()
  path.write_bytes(whole[:-5])
  assert [r["kind"] for r in tail.read()] == ["run", "coordinator"]
  assert list(tail.read()) == []
  path.write_bytes(whole + b"nonsense\n")
  assert [r["kind"] for r in tail.read()] == ["join"]
  assert tail.bad_lines == 1
  # Another run's file in its place.
  path.write_bytes(whole.splitlines(keepends=True)[0])
  assert [r["kind"] for r in tail.read()] == ["run"]


def test_journal_of_a_restarted_job_is_read_from_its_start(
  tmp_path,
):
  path = tmp_path / "run.jsonl"
  path.write_text('{"kind": "join", "time": 0, "replica": 0, "step": 0}\n')
  tail = journal_tail.Tail(path)
  assert len(list(tail.read())) == 1
  path.rename(tmp_path / "old.jsonl")
  with journal.Journal(path) as written:
    written.write("run", strategy="sync_replicas", step=0)
    written.write("coordinator", epoch=0, step=0)
  assert [r["kind"] for r in tail.read()] == ["run", "coordinator"]
  assert tail.bad_lines == 0


def test_new_records_are_as_recent_as_the_last_read(tmp_path):
  """The clock of this host or of the file's may be wrong."""
  path = tmp_path / "run.jsonl"
  tail = journal_tail.Tail(path)

  def write(ago):
    with journal.Journal(path) as written:
      written.write("run", strategy="sync_replicas", step=0)
    then = time.time() - ago
    os.utime(path, (then, then))

  write(ago=60.0)
  assert len(list(tail.read())) == 1
  # It may have been written long before the first look.
  assert 60.0 <= tail.age < 120.0
  write(ago=3600.0)
  assert len(list(tail.read())) == 1
  assert tail.age < 60.0
  write(ago=-3600.0)
  assert len(list(tail.read())) == 1
  assert tail.age == 0.0


def test_a_large_journal_is_not_held_in_memory(tmp_path):
  path = tmp_path / "run.jsonl"
  line = '{"kind": "join", "time": 0, "replica": 0, "step": 0, "more": "%s"}\n'
  path.write_text(4000 * (line % (1000 * "x")))
  tracemalloc.start()
  try:
    assert sum(1 for _ in journal_tail.Tail(path).read()) == 4000
    _, most = tracemalloc.get_traced_memory()
  finally:
    tracemalloc.stop()
  assert most < 1 << 20
