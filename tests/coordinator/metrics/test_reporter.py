"""Tests of requests that can't be met, and of following a journal."""

import pathlib
import threading
import urllib.request

import pytest
import waiting

from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics import reporter


def test_a_package_that_is_missing_is_named(tmp_path, monkeypatch):
  monkeypatch.setattr(reporter.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(
    ModuleNotFoundError,
    match=r'tensorboardX is not installed; .*"optax-dist\[metrics\]"',
  ):
    reporter.Reporter(tmp_path / "run.jsonl", folder="folder")
  # The port needs no package.
  reporter.Reporter(tmp_path / "run.jsonl", port=0).close()


def test_a_journal_is_followed(tmp_path):
  path = tmp_path / "run.jsonl"
  one = reporter.Reporter(path, port=0)

  def text():
    with urllib.request.urlopen(one.url, timeout=60) as answer:
      return answer.read().decode()

  try:
    assert "optax_dist_steps_total 0.0" in text()
    with journal.Journal(path) as file:
      file.write("run", strategy="sync_replicas", step=0)
      file.write("join", replica=0, incarnation=1, step=0)
      assert "optax_dist_members 1.0" in text()
      file.write("lost", replica=0, incarnation=1, step=0)
    assert "optax_dist_members 0.0" in text()
  finally:
    one.close()
    one.close()


FULL = pathlib.Path("/dev/full")


def _journal(folder):
  """The journal of a run that has taken a step."""
  with journal.Journal(folder / "run.jsonl") as file:
    file.write("run", strategy="sync_replicas", step=0)
    file.write("commit", step=0, attempt=0, members=[])
  return file.path


def _closes(one):
  """Whether `close` returns."""
  thread = threading.Thread(target=one.close, daemon=True)
  thread.start()
  thread.join(60.0)
  return not thread.is_alive()


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
def test_a_full_disk_ends_scalars_but_not_the_run(
  tmp_path, monkeypatch, caplog
):
  from tensorboardX import record_writer

  monkeypatch.setattr(reporter, "_PERIOD", 0.1)
  monkeypatch.setattr(record_writer, "open_file", lambda path: FULL.open("wb"))
  one = reporter.Reporter(_journal(tmp_path), folder=tmp_path)
  waiting.until(lambda: caplog.records)
  assert _closes(one)
  (record,) = caplog.records
  assert "scalars can't be written" in record.getMessage()
  assert "No space left on device" in record.getMessage()


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

  monkeypatch.setattr(reporter.tensorboard, "Scalars", lambda folder: Failing())
  one = reporter.Reporter(_journal(tmp_path), folder="folder")
  one.close()
  assert calls == ["write", "close"]
  (record,) = caplog.records
  assert "scalars can't be written" in record.getMessage()


def test_a_run_does_not_wait_for_its_last_points(tmp_path, monkeypatch, caplog):
  monkeypatch.setattr(reporter, "_PERIOD", 0.01)
  monkeypatch.setattr(reporter, "_PATIENCE", 0.1, raising=False)
  entered, release = threading.Event(), threading.Event()

  class Stuck:
    def write(self, metrics, step):
      entered.set()
      release.wait(60.0)

    def close(self):
      pass

  monkeypatch.setattr(reporter.tensorboard, "Scalars", lambda folder: Stuck())
  one = reporter.Reporter(_journal(tmp_path), folder="folder")
  try:
    assert entered.wait(60.0)
    assert _closes(one)
    assert "could not be reported in 0 s" in caplog.text
  finally:
    release.set()
