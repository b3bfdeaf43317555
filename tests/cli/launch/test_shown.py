"""Tests of a launch's output, with and without a terminal."""

import errno
import io
import sys
import tempfile

from optax_dist.cli.launch import shown


class _Terminal(io.StringIO):
  def isatty(self):
    return True


def test_off_a_terminal_there_are_lines_only(capsys):
  with shown.Shown(None) as screen:
    screen.echo("replica 1", "loss 0.5", False)
    screen.echo("replica 0", "[a] warning", True)
    screen.update()
  assert screen.journal is None
  assert capsys.readouterr() == (
    "[replica 1] loss 0.5\n",
    "[replica 0] [a] warning\n",
  )


def test_on_a_terminal_they_stand_above_a_table(monkeypatch):
  terminal = _Terminal()
  monkeypatch.setattr(sys, "stderr", terminal)
  monkeypatch.setenv("TERM", "xterm")
  with shown.Shown(None) as screen:
    # Of a run that keeps none, the journal is kept as long as it is shown.
    folder = screen.journal.parent
    assert folder.is_dir()
    screen.echo("replica 1", "[bold]loss[/bold]", False)
    screen.update()
  assert not folder.exists()
  text = terminal.getvalue()
  assert "[replica 1] [bold]loss[/bold]" in text
  assert "steps/s" in text


def test_on_a_terminal_without_temporary_files_there_are_lines(
  monkeypatch, capsys
):
  def none_is_usable():
    raise FileNotFoundError(errno.ENOENT, "No usable temporary directory")

  monkeypatch.setattr(sys, "stderr", _Terminal())
  monkeypatch.setattr(tempfile, "TemporaryDirectory", none_is_usable)
  with shown.Shown(None) as screen:
    screen.echo("replica 1", "loss 0.5", False)
    screen.update()
  assert capsys.readouterr().out == "[replica 1] loss 0.5\n"
