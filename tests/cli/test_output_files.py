"""The file that is written where the user says."""

import json
import math

import pytest

from optax_dist.cli import errors, output_files


def test_a_directory_that_is_not_there_is_named_before_the_work(tmp_path):
  output_files.check(None)
  output_files.check(tmp_path / "x.json")
  with pytest.raises(errors.CommandError, match="there is no directory"):
    output_files.check(tmp_path / "no" / "x.json")


def test_what_goes_wrong_is_one_line(tmp_path):
  with pytest.raises(
    errors.CommandError, match=r"can't write .*Is a directory"
  ):
    output_files.write_json(tmp_path, {})


def test_figures_are_json_and_the_file_is_told(tmp_path, capsys):
  path = tmp_path / "x.json"
  output_files.write_json(None, {})
  output_files.write_json(path, {"steps": [1, 2.5]})
  assert json.loads(path.read_text()) == {"steps": [1, 2.5]}
  assert capsys.readouterr().out == f"written: {path}\n"
  # JSON has no such numbers, so a file with them could not be read elsewhere.
  with pytest.raises(ValueError, match="nan"):
    output_files.write_json(tmp_path / "y.json", {"rate": math.nan})


def test_what_is_read_is_not_written_over(tmp_path):
  journal, link = tmp_path / "run.jsonl", tmp_path / "link.jsonl"
  journal.write_text("all that is left of a run")
  link.symlink_to(journal)
  for path in (journal, link, tmp_path / ".." / tmp_path.name / "run.jsonl"):
    with pytest.raises(errors.CommandError, match="it is also an input"):
      output_files.check(path, journal)
  output_files.check(tmp_path / "new.json", journal)
  output_files.check(tmp_path / "new.json", tmp_path / "no.jsonl")
