"""Journals from the command line."""

import json

import pytest

from optax_dist.cli import errors, main
from optax_dist.cli.runs import journal_file

_RUN = {
  "kind": "run",
  "time": 0,
  "version": 1,
  "strategy": "sync_replicas",
  "step": 0,
}


def test_many_bad_lines_are_counted(tmp_path, capsys):
  path = tmp_path / "run.jsonl"
  path.write_text(json.dumps(_RUN) + "\n" + "{\n" * 25)
  (run,) = journal_file.read(path)
  assert {name: run[name] for name in _RUN} == _RUN
  lines = capsys.readouterr().err.splitlines()
  assert len(lines) == 12
  assert "run.jsonl: line 2: not JSON" in lines[0]
  assert "15 more lines are bad" in lines[10]
  assert "going on with the other 1 lines" in lines[11]


@pytest.mark.parametrize(
  "record",
  [
    {"kind": "process", "time": 1.0, "pid": 7},
    {"kind": "process", "time": 1.0, "replica": [1], "host": "a", "pid": 7},
    {"kind": "lost", "time": 1.0, "replica": {}, "step": 0},
  ],
)
@pytest.mark.parametrize("command", ["watch", "report"])
def test_commands_survive_malformed_records(tmp_path, capsys, command, record):
  path = tmp_path / "run.jsonl"
  join = {"kind": "join", "time": 0.5, "replica": 0, "step": 0}
  end = {"kind": "finish", "time": 2.0, "step": 0}
  lines = map(json.dumps, [_RUN, join, record, end])
  path.write_text("".join(f"{line}\n" for line in lines))
  assert main.main([command, str(path)]) == 0
  assert f"{path}: " in capsys.readouterr().err


def test_valid_journal_prints_no_warning(tmp_path, capsys):
  path = tmp_path / "run.jsonl"
  path.write_text(json.dumps(_RUN))
  journal_file.read(path)
  assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
  ("text", "said"), [(None, "can't be read: "), ("{\n", "no line of it")]
)
def test_a_file_without_a_record_of_a_run_is_an_error(tmp_path, text, said):
  path = tmp_path / "run.jsonl"
  if text is not None:
    path.write_text(text)
  with pytest.raises(errors.CommandError, match=f"--journal {path}: {said}"):
    journal_file.read(path, "--journal ")
