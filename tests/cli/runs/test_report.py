"""The ``report`` command."""

import run_journals

from optax_dist.cli import main
from optax_dist.coordinator import journal


def test_a_run_is_reported(tmp_path, capsys):
  path = run_journals.simulated(tmp_path / "run.jsonl")
  assert main.main(["report", str(path)]) == 0
  said = capsys.readouterr().out
  for word in ("useful", "waiting", "recovery", "goodput", "4 replicas for"):
    assert word in said


def test_a_file_without_a_run_is_refused(tmp_path, capsys):
  path = tmp_path / "run.jsonl"
  assert main.main(["report", str(path)]) == 2
  assert "can't be read" in capsys.readouterr().err
  with journal.Journal(path) as file:
    file.write("run", strategy="sync_replicas", step=0)
  assert main.main(["report", str(path)]) == 2
  assert "nothing to report" in capsys.readouterr().err
