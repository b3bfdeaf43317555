"""Reading a journal while it is written."""

from optax_dist.coordinator import journal, journal_tail


def test_lines_come_once_they_are_whole(tmp_path):
  path = tmp_path / "run.jsonl"
  tail = journal_tail.Tail(path)
  assert tail.read() == []
  with journal.Journal(path) as written:
    written.write("run", strategy="sync_replicas", step=0)
    written.write("leader", replica=0, term=0, step=0)
    written.write("join", replica=0, incarnation=0, step=0)
  whole = path.read_bytes()
  path.write_bytes(whole[:-5])
  assert [r["kind"] for r in tail.read()] == ["run", "leader"]
  assert tail.read() == []
  path.write_bytes(whole + b"nonsense\n")
  assert [r["kind"] for r in tail.read()] == ["join"]
  assert tail.bad_lines == 1
  # Another run's file in its place.
  path.write_bytes(whole.splitlines(keepends=True)[0])
  assert [r["kind"] for r in tail.read()] == ["run"]
