"""Event files: read back, and errors of theirs."""

import pathlib

import event_files
import numpy as np
import optax
import pytest
import run_journals

from optax_dist import coordinator
from optax_dist.coordinator import journal, journal_tail
from optax_dist.coordinator.metrics import run_numbers, tensorboard

FULL = pathlib.Path("/dev/full")


def test_what_is_written_is_read_back(tmp_path):
  path = tmp_path / "run.jsonl"
  tail, numbers = journal_tail.Tail(path), run_numbers.RunNumbers()
  points = tensorboard.Points(numbers, tmp_path / "new" / "folder")

  def update(force=True):
    numbers.update(tail.read())
    points.update(force)

  with journal.Journal(path) as written:
    run_journals.begin(written)
    for step, at in enumerate((1.0, 1.5, 3.0)):
      run_journals.commit(written, step, 0, 1, at=at)
    run_journals.drop(written, 2, 0, at=3.0)
    update()
    update()  # No step since.
    run_journals.commit(written, 3, 0, 1, at=3.25)
    update(force=False)  # A second has not passed.
    update()
    run_journals.begin(written)  # The run has restarted.
    for step, at in enumerate((1.0, 5.0)):
      run_journals.commit(written, step, 0, 1, at=at)
  update()
  points.close()
  found = event_files.read(tmp_path)
  assert found["optax_dist/gradients_applied"] == [(3, 6), (4, 8), (2, 4)]
  assert found["optax_dist/step_seconds"] == [(3, 1.0), (4, 0.25), (2, 4.0)]
  assert found["optax_dist/gradients_dropped/stale"] == [(3, 1), (4, 1)]


def test_a_run_ends_with_its_last_step(tmp_path):
  zeros = np.zeros(3, np.float32)

  def train(replica):
    while replica.global_step < 5 and not replica.finished:
      replica.step(zeros)
    if not replica.replica:
      replica.finish()

  path = tmp_path / "run.jsonl"
  coordinator.run_embedded(train, 2, optax.sgd(0.1), zeros, journal=path)
  numbers = run_journals.numbers_of(*run_journals.whole(path))
  tensorboard.Points(numbers, tmp_path / "events").close()
  points = event_files.read(tmp_path / "events")
  last = {tag: found[-1] for tag, found in points.items()}
  assert last["optax_dist/steps"] == (5, 5.0)
  assert last["optax_dist/gradients_applied"] == (5, 10.0)
  step, goodput = last["optax_dist/goodput_ratio"]
  assert step == 5
  assert 0 < goodput < 1
  assert last["optax_dist/staleness"] == (5, 0.0)
  assert last["optax_dist/step_seconds"][1] > 0


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error(tmp_path, monkeypatch):
  from tensorboardX import record_writer

  full = FULL.open("wb")
  monkeypatch.setattr(record_writer, "open_file", lambda path: full)
  path = run_journals.ended(tmp_path / "run.jsonl")
  numbers = run_journals.numbers_of(*run_journals.whole(path))
  points = tensorboard.Points(numbers, tmp_path)
  for call in (points.update, points.close):
    with pytest.raises(OSError, match="No space left on device"):
      call()
