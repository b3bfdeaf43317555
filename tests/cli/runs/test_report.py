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
  assert "runs" not in said
  run_journals.simulated(path)  # It is started again, and goes on there.
  assert main.main(["report", str(path)]) == 0
  assert f"{path}, the last of 2 runs\n" in capsys.readouterr().out


def test_a_file_without_a_run_is_refused(tmp_path, capsys):
  path = tmp_path / "run.jsonl"
  assert main.main(["report", str(path)]) == 2
  assert "can't be read" in capsys.readouterr().err
  with journal.Journal(path) as file:
    file.write("run", strategy="sync_replicas", step=0)
  assert main.main(["report", str(path)]) == 2
  assert "nothing to report" in capsys.readouterr().err


def test_report_has_the_cost_of_losses(tmp_path, capsys):
  """Of 12 gradients in 6 s two are missing; the replica was away for 1 s."""
  path = tmp_path / "run.jsonl"
  with journal.Journal(path) as written:
    run_journals.begin(written, range(2))
    for step in range(4):
      run_journals.commit(written, step, 0, 1, at=1.0 + step)
    written.write("lost", replica=1, incarnation=0, step=4, time=4.5)
    run_journals.commit(written, 4, 0, at=5.0)
    written.write("join", replica=1, incarnation=2, step=5, time=5.5)
    run_journals.commit(written, 5, 0, at=6.0)
    run_journals.commit(written, 6, 0, 1, at=7.0)
    written.write("finish", step=7, reason="finished", time=8.0)
  assert main.main(["report", str(path)]) == 0
  assert capsys.readouterr().out.splitlines()[-1] == (
    "kept 83.3% of the useful computing of a run without losses (91.7% if only absence"
    " counts); 1 loss of a replica, 2 replica-seconds each"
  )


def test_report_of_a_run_without_losses_has_no_cost(tmp_path, capsys):
  path = run_journals.simulated(tmp_path / "run.jsonl")
  assert main.main(["report", str(path)]) == 0
  assert "kept" not in capsys.readouterr().out


def test_loss_that_made_the_others_faster_has_no_cost(tmp_path, capsys):
  path = tmp_path / "run.jsonl"
  with journal.Journal(path) as written:
    run_journals.begin(written, range(2))
    for step in range(4):
      run_journals.commit(written, step, 0, 1, at=5.0 * (1 + step))
    written.write("lost", replica=1, incarnation=0, step=4, time=20.0)
    for step in range(4, 20):
      run_journals.commit(written, step, 0, at=20.0 + 0.6 * (step - 3))
  assert main.main(["report", str(path)]) == 0
  text = capsys.readouterr().out.splitlines()[-1]
  assert text.startswith("kept at least 100%")
  assert "replica-seconds each" not in text
