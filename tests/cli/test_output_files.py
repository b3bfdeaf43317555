"""Files that are written where the user says."""

import json
import math
import pathlib

import pytest

from optax_dist.cli import errors, output_files


def test_a_directory_that_is_not_there_is_named_before_the_work(tmp_path):
  output_files.check_writable(None, tmp_path / "x.png")
  with pytest.raises(errors.CommandError, match="there is no directory"):
    output_files.check_writable(tmp_path / "no" / "x.png")


def test_what_goes_wrong_is_one_line(tmp_path):
  with (
    pytest.raises(errors.CommandError, match=r"can't write .*Is a directory"),
    output_files.writing(tmp_path),
  ):
    tmp_path.write_text("")


def test_what_is_no_fault_of_the_file_stays_as_it_is(tmp_path):
  with pytest.raises(ZeroDivisionError), output_files.writing(tmp_path):
    _ = 1 / 0


def test_figures_are_json(tmp_path):
  output_files.write_json(tmp_path / "x.json", {"steps": [1, 2.5]})
  assert json.loads((tmp_path / "x.json").read_text()) == {"steps": [1, 2.5]}
  with pytest.raises(errors.CommandError, match="can't write"):
    output_files.write_json(tmp_path, {})
  # JSON has no such numbers, so a file with them could not be read elsewhere.
  with pytest.raises(ValueError, match="nan"):
    output_files.write_json(tmp_path / "y.json", {"rate": math.nan})


def test_only_what_was_asked_for_is_told(tmp_path, capsys):
  output_files.tell(tmp_path / "a.json", None)
  assert capsys.readouterr().out == f"written: {tmp_path / 'a.json'}\n"


def test_what_is_read_is_not_written_over(tmp_path):
  journal, link = tmp_path / "run.jsonl", tmp_path / "link.jsonl"
  journal.write_text("all that is left of a run")
  link.symlink_to(journal)
  for path in (journal, link, tmp_path / ".." / tmp_path.name / "run.jsonl"):
    with pytest.raises(errors.CommandError, match="it is also an input"):
      output_files.check_writable(path, read=(None, journal))
  new = tmp_path / "new.png"
  with pytest.raises(errors.CommandError, match="it is also another output"):
    output_files.check_writable(new, picture=new, read=(journal,))
  nowhere = pathlib.Path("/dev/null")
  output_files.check_writable(nowhere, nowhere, new, read=(journal, nowhere))
