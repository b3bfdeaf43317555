"""The ``watch`` command."""

import sys
import threading

import pytest
import run_journals

from optax_dist.cli import main
from optax_dist.coordinator import journal


@pytest.fixture
def path(tmp_path):
  return run_journals.ended(tmp_path / "run.jsonl")


def test_watch_once_prints_the_table(path, capsys):
  assert main.main(["watch", str(path), "--once"]) == 0
  shown = capsys.readouterr().out
  assert "step 4, 1.0 steps/s; ended: finished" in shown
  row = next(line for line in shown.splitlines() if line.startswith("2 "))
  assert row.split()[:5] == ["2", "in", "0", "4", "0"]
  assert "4 stale" in row


def test_watch_follows_a_run_until_its_end(tmp_path, capsys):
  path, codes = tmp_path / "run.jsonl", []
  with journal.Journal(path) as written:
    run_journals.begin(written)
    follower = threading.Thread(
      target=lambda: codes.append(main.main(["watch", str(path)]))
    )
    follower.start()
    try:
      run_journals.commit(written, 0, 0, 1, 2, at=1.0)
      follower.join(1.0)
      assert follower.is_alive()
    finally:
      written.write("finish", step=1, reason="finished")
      follower.join(60.0)
  assert codes == [0]
  assert "step 1, " in capsys.readouterr().out


def test_terminal_shows_the_table_during_the_run(path, capsys, monkeypatch):
  monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
  assert main.main(["watch", str(path)]) == 0
  shown = capsys.readouterr()
  assert "step 4, 1.0 steps/s" in shown.err
  assert not shown.out


def test_bad_lines_are_counted(path, capsys):
  with path.open("ab") as file:
    file.write(b"nonsense\n")
  assert main.main(["watch", "--once", str(path)]) == 0
  assert "bad lines: 1;" in capsys.readouterr().err
  with journal.Journal(path) as written:
    written.write("finish", step=4, reason="finished")
  assert main.main(["watch", str(path)]) == 0
  assert "bad lines: 1;" in capsys.readouterr().err


@pytest.mark.parametrize(
  ("before", "after"),
  [(b'"version": 1', b'"version": 2'), (b'{"kind": "run"', b"\xef\xbb\xbf{")],
)
def test_journal_of_another_version_is_reported(path, before, after, capsys):
  path.write_bytes(path.read_bytes().replace(before, after))
  assert main.main(["watch", "--once", str(path)]) == 0
  shown = capsys.readouterr()
  assert "step 4, " in shown.out
  assert "bad lines: 1;" in shown.err


def test_a_missing_journal_is_an_error(tmp_path, capsys):
  assert main.main(["watch", str(tmp_path / "no.jsonl")]) == 2
  assert "can't be read: No such file" in capsys.readouterr().err
  assert main.main(["watch", str(tmp_path), "--once"]) == 2
  assert "can't be read: Is a directory" in capsys.readouterr().err


@pytest.mark.parametrize("port", ["-1", "70000", "abc"])
def test_an_invalid_port_is_refused(path, port, capsys):
  assert main.main(["watch", str(path), "--web", port]) == 2
  assert "from 0 to 65535" in capsys.readouterr().err


@pytest.mark.parametrize("more", [["--once"], []])
def test_file_that_is_not_a_journal_is_refused(tmp_path, more, capsys):
  path = tmp_path / "train.py"
  path.write_text("import jax\nprint(jax)\n")
  assert main.main(["watch", str(path), *more]) == 2
  assert "is no journal: none of its 2 lines" in capsys.readouterr().err
