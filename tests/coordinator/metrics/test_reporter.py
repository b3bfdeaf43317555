"""Tests of requests that can't be met, and of following a journal."""

import itertools
import pathlib
import threading
import urllib.request

import pytest
import waiting

from optax_dist import coordinator
from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics import reporter


def test_a_package_that_is_missing_is_named(monkeypatch):
  monkeypatch.setattr(reporter.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(
    ModuleNotFoundError,
    match=r'tensorboardX is not installed; .*"optax-dist\[metrics\]"',
  ):
    coordinator.Options(tensorboard="folder")
  coordinator.Options(metrics_port=0)  # It needs no package.


def test_a_port_must_be_one():
  with pytest.raises(ValueError, match=r"metrics_port must be .* got 70000"):
    coordinator.Options(metrics_port=70000)


def test_a_journal_is_followed(tmp_path):
  path = tmp_path / "run.jsonl"
  one = reporter.Reporter(port=0, follow=path)
  one.add(lambda: {"replica_step": {("0",): 5}})
  one.add(lambda: {"replica_step": {("1",): 6}})

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
    # What several report under one name is one metric.
    assert text().count("# TYPE optax_dist_replica_step gauge") == 1
    assert 'optax_dist_replica_step{replica="1"} 6.0' in text()
  finally:
    one.close()
    one.close()


def test_only_the_leader_reports_on_the_run():
  one = reporter.Reporter()
  names = lambda: list(one.collect())
  try:
    assert names() == []
    one.begin("a", [{"kind": "run", "time": 0.0, "step": 3}])
    one.take({"kind": "join", "time": 0.1, "replica": 0})
    assert "members" in names()
    one.begin("b", [])
    one.end("a")  # It was late to notice.
    assert one.collect()["step"] == {(): 3}
    one.end("b")
    assert names() == []
    one.begin("b", [])
    one.take({"kind": "finish", "time": 0.2})
    one.end("b")  # What was at the end can still be asked for.
    assert "members" in names()
  finally:
    one.close()


FULL = pathlib.Path("/dev/full")


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
  steps = itertools.count(1)

  def found():
    step = next(steps)
    return {"replica_step": {(str(i),): step for i in range(20)}}

  one = reporter.Reporter(folder=tmp_path)
  one.add(found)
  waiting.until(lambda: caplog.records)
  assert _closes(one)
  (record,) = caplog.records
  assert "scalars can't be written" in record.getMessage()
  assert "No space left on device" in record.getMessage()


@pytest.mark.parametrize("fails", ["write", "close"])
def test_an_error_of_the_event_file_is_one_warning(monkeypatch, caplog, fails):
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
  one = reporter.Reporter(folder="folder")
  one.close()
  assert calls == ["write", "close"]
  (record,) = caplog.records
  assert "scalars can't be written" in record.getMessage()


def test_a_run_does_not_wait_for_its_last_points(monkeypatch, caplog):
  monkeypatch.setattr(reporter, "_PERIOD", 0.01)
  monkeypatch.setattr(reporter, "_PATIENCE", 0.1, raising=False)
  entered, release = threading.Event(), threading.Event()

  class Stuck:
    def write(self, metrics, step):
      entered.set()
      release.wait(60.0)

    def close(self):
      pass

  one = reporter.Reporter()
  one._scalars = Stuck()
  one.add(lambda: {"replica_step": {("0",): 1}})
  try:
    assert entered.wait(60.0)
    assert _closes(one)
    assert "could not be reported in 0 s" in caplog.text
  finally:
    release.set()
