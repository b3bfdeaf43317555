"""Event files: read back, and errors of theirs, which end no run."""

import pathlib
import sys

import event_files
import numpy as np
import optax
import pytest

from optax_dist import coordinator
from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics import table, tensorboard

FULL = pathlib.Path("/dev/full")


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
  points = tensorboard.Points(path, tmp_path / "events")
  coordinator.run_embedded(train, 2, optax.sgd(0.1), zeros, journal=path)
  points.close()
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


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, "tensorboardX", None)
  with pytest.raises(ModuleNotFoundError, match="tensorboardX"):
    tensorboard.Points(tmp_path / "run.jsonl", tmp_path)


def _journal(folder):
  """The journal of a run that has taken a step."""
  with journal.Journal(folder / "run.jsonl") as file:
    file.write("run", strategy="sync_replicas", step=0)
    file.write("commit", step=0, attempt=0, members=[])
  return file.path


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_ends_scalars_but_not_the_run(
  tmp_path, monkeypatch, caplog
):
  from tensorboardX import record_writer

  monkeypatch.setattr(record_writer, "open_file", lambda path: FULL.open("wb"))
  points = tensorboard.Points(_journal(tmp_path), tmp_path)
  points.update()
  (record,) = caplog.records
  assert "scalars can't be written" in record.getMessage()
  assert "No space left on device" in record.getMessage()
  points.close()
  assert caplog.records == [record]


@pytest.mark.parametrize("fails", ["write", "close"])
def test_an_error_of_the_event_file_is_one_warning(
  tmp_path, monkeypatch, caplog, fails
):
  calls = []

  class Failing:
    def write(self, metrics, step):
      self._call("write")

    def close(self):
      self._call("close")

    def _call(self, name):
      calls.append(name)
      if name == fails:
        raise OSError(28, "No space left on device")

  monkeypatch.setattr(tensorboard, "Scalars", lambda folder: Failing())
  tensorboard.Points(_journal(tmp_path), "folder").close()
  assert calls == ["write", "close"]
  (record,) = caplog.records
  assert "scalars can't be written" in record.getMessage()
