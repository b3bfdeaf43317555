"""Latencies from the command line."""

import json

import pytest

from optax_dist.cli import errors, latency_source

_RUN = {
  "kind": "run",
  "time": 0,
  "version": 1,
  "policy": "sync_replicas",
  "step": 0,
}


def test_many_bad_lines_are_counted(tmp_path, capsys):
  path = tmp_path / "run.jsonl"
  path.write_text(json.dumps(_RUN) + "\n" + "{\n" * 25)
  assert latency_source.read_journal(path) == [_RUN]
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 12
  assert "run.jsonl: line 2: not JSON" in lines[0]
  assert "15 more lines are bad" in lines[10]
  assert "going on with the other 1 lines" in lines[11]


def test_a_good_journal_says_nothing(tmp_path, capsys):
  path = tmp_path / "run.jsonl"
  path.write_text(json.dumps(_RUN))
  latency_source.read_journal(path)
  assert capsys.readouterr().err == ""


def test_what_is_not_installed_is_named(monkeypatch):
  monkeypatch.setattr(
    latency_source.importlib.util, "find_spec", lambda name: None
  )
  with pytest.raises(
    errors.CommandError, match="rich, matplotlib, scikit-learn not installed"
  ):
    latency_source.check_installed("sklearn")


def test_a_directory_that_is_not_there_is_named_before_the_work(tmp_path):
  latency_source.check_writable(None, tmp_path / "x.png")
  with pytest.raises(errors.CommandError, match="there is no directory"):
    latency_source.check_writable(tmp_path / "no" / "x.png")
