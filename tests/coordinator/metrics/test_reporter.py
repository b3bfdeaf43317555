"""Tests of requests that can't be met, and of following a journal."""

import urllib.request

import pytest

from optax_dist import coordinator
from optax_dist.coordinator import journal
from optax_dist.coordinator.metrics import metric, reporter


@pytest.mark.parametrize(
  ("wanted", "package"),
  [
    ({"metrics_port": 0}, "prometheus-client"),
    ({"tensorboard": "folder"}, "tensorboardX"),
  ],
)
def test_a_package_that_is_missing_is_named(monkeypatch, wanted, package):
  monkeypatch.setattr(reporter.importlib.util, "find_spec", lambda name: None)
  with pytest.raises(
    ModuleNotFoundError,
    match=rf'{package} is not installed; .*"optax-dist\[metrics\]"',
  ):
    coordinator.Options(**wanted)


def test_a_port_must_be_one():
  with pytest.raises(ValueError, match=r"metrics_port must be .* got 70000"):
    coordinator.Options(metrics_port=70000)


def test_a_journal_is_followed(tmp_path):
  path = tmp_path / "run.jsonl"
  one = reporter.Reporter(port=0, follow=path)
  loss = metric.one("training_loss", "gauge", "Loss.", 0.5)
  one.add(lambda: [loss])
  one.add(lambda: [loss._replace(samples=(metric.Sample(0.25, {"of": "b"}),))])

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
    assert text().count("# TYPE optax_dist_training_loss gauge") == 1
  finally:
    one.close()
    one.close()


def test_only_who_leads_reports_on_the_run():
  one = reporter.Reporter()
  names = lambda: [found.name for found in one.collect()]
  try:
    assert names() == []
    one.begin("a", [{"kind": "run", "time": 0.0, "step": 3}])
    one.take('{"kind": "join", "time": 0.1, "replica": 0}')
    assert "members" in names()
    one.begin("b", [])
    one.end("a")  # It was late to notice.
    assert one.collect()[0].samples[0].value == 3
    one.end("b")
    assert names() == []
    one.begin("b", [])
    one.take('{"kind": "finish", "time": 0.2}')
    one.end("b")  # What was at the end can still be asked for.
    assert "members" in names()
  finally:
    one.close()
