"""Event files, read back."""

import event_files
import numpy as np
import optax
import pytest

from optax_dist import coordinator
from optax_dist.coordinator.metrics import reporter, table, tensorboard


def test_what_is_written_is_read_back(tmp_path):
  seconds = table.Distribution((1.0,))
  scalars = tensorboard.Scalars(tmp_path / "new" / "folder")
  metrics = lambda applied: {
    "gradients_applied": {(): applied},
    "step_seconds": {(): seconds},
    "gradients_dropped": {("stale",): applied - 1},
  }
  seconds.add(0.5)
  seconds.add(1.5)
  scalars.write(metrics(2), step=2)
  scalars.write(metrics(2), step=3)  # No step since.
  seconds.add(0.25)
  scalars.write(metrics(3), step=4)
  seconds = table.Distribution((1.0,))
  seconds.add(4.0)
  scalars.write(metrics(1), step=1)  # A run that restarted.
  scalars.close()
  assert event_files.read(tmp_path) == {
    "optax_dist/gradients_applied": [(2, 2.0), (3, 2.0), (4, 3.0), (1, 1.0)],
    "optax_dist/step_seconds": [(2, 1.0), (4, 0.25), (1, 4.0)],
    "optax_dist/gradients_dropped/stale": [
      (2, 1.0),
      (3, 1.0),
      (4, 2.0),
      (1, 0.0),
    ],
  }


def test_a_run_ends_with_its_last_step(tmp_path):
  zeros = np.zeros(3, np.float32)

  def train(replica):
    while replica.global_step < 5 and not replica.finished:
      replica.step(zeros)
    if not replica.replica:
      replica.finish()

  path = tmp_path / "run.jsonl"
  with reporter.Reporter(path, folder=tmp_path / "events"):
    coordinator.run_embedded(train, 2, optax.sgd(0.1), zeros, journal=path)
  points = event_files.read(tmp_path / "events")
  last = {tag: found[-1] for tag, found in points.items()}
  assert last["optax_dist/steps"] == (5, 5.0)
  assert last["optax_dist/gradients_applied"] == (5, 10.0)
  step, goodput = last["optax_dist/goodput_ratio"]
  assert step == 5
  assert 0 < goodput < 1
  assert last["optax_dist/staleness"] == (5, 0.0)
  assert last["optax_dist/step_seconds"][1] > 0


def test_a_folder_that_can_not_be_made_is_an_error(tmp_path):
  (tmp_path / "file").touch()
  with pytest.raises(OSError, match="file"):
    tensorboard.Scalars(tmp_path / "file" / "folder")
