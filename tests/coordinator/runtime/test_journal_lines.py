"""Lines of the journal that the leader's driver adds to."""

from optax_dist.coordinator import journal
from optax_dist.coordinator.protocol import notes
from optax_dist.coordinator.runtime import journal_lines


def test_deadlines_are_written_where_they_have_changed(tmp_path):
  silences = {"p1": 30.0, "store": 30.0}
  path = tmp_path / "run.jsonl"
  lines = journal_lines.JournalLines(path, {"strategy": "s"}, lambda: silences)
  lines.open([])
  lines.write(notes.RunBegins(0))
  known = ((0, "p0"), (1, "p1"))
  lines.write(notes.DeadlinesSeen(30.0, known))
  silences["p1"] = 29.0
  lines.write(notes.DeadlinesSeen(30.0, known))
  silences["p1"] = 5.0
  lines.write(notes.DeadlinesSeen(30.0, known))
  lines.write(notes.DeadlinesSeen(6.0, ((0, "p0"),)))
  lines.close()
  _, *found = journal.read(path, strict=True).records
  assert [(r["kind"], r["attempt"], r["silence"]) for r in found] == [
    ("deadlines", 30.0, {"1": 30.0}),
    ("deadlines", 30.0, {"1": 5.0}),
    ("deadlines", 6.0, {}),
  ]
