"""The command as a whole: help, version, errors."""

import os
import subprocess
import sys

import pytest

from optax_dist.cli import errors, main

_SLOW = ("flax", "matplotlib", "sklearn")


def _python(*args, **kwargs):
  return subprocess.run(
    [sys.executable, *args], timeout=300, text=True, **kwargs
  )


@pytest.mark.parametrize(
  "argv", [["--help"], ["launch", "--help"], ["--version"]]
)
def test_help_and_version_exit_with_0(argv, capsys):
  assert main.main(argv) == 0
  captured = capsys.readouterr()
  assert captured.out
  assert not captured.err


@pytest.mark.parametrize(
  ("argv", "said"),
  [
    ([], "a command is needed"),
    (["fly"], "'fly'"),
    (["wach", "x.jsonl"], "(see optax-dist --help)"),
    (["launch", "--wings", "2"], "--wings (see optax-dist launch --help)"),
    (
      ["plan", "--latency", "constant:1", "--reps", "2"],
      "optax-dist plan --help",
    ),
    (["--wings"], "--wings (see optax-dist --help)"),
    (["plan", "--latency"], "--latency"),
    # An abbreviation of --replicas.
    (["launch", "--replica", "2"], "unknown arguments: --replica (see"),
  ],
)
def test_wrong_usage_is_one_line_and_exit_code_2(argv, said, capsys):
  assert main.main(argv) == 2
  captured = capsys.readouterr()
  assert not captured.out
  assert captured.err.count("\n") == 1
  assert captured.err.startswith("optax-dist")
  assert said in captured.err


def test_a_command_error_is_one_line_and_its_exit_code(monkeypatch, capsys):
  def fail(argv):
    raise errors.CommandError("two\nlines", exit_code=1)

  monkeypatch.setattr(main, "_dispatch", fail)
  assert main.main([]) == 1
  assert capsys.readouterr().err == "optax-dist: two lines\n"


def test_ctrl_c_is_one_line_and_exit_code_130(monkeypatch, capsys):
  def interrupt(argv):
    raise KeyboardInterrupt

  monkeypatch.setattr(main, "_dispatch", interrupt)
  assert main.main([]) == 130
  assert capsys.readouterr().err == "optax-dist: interrupted\n"


def test_help_imports_no_slow_packages():
  script = (
    "import sys; from optax_dist.cli import errors, main;"
    "assert main.main(['plan', '--help']) == 0;"
    f"slow = [m for m in {_SLOW!r} if m in sys.modules];"
    "sys.exit(f'imported {slow}' if slow else 0)"
  )
  done = _python("-c", script, capture_output=True)
  assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("command", ["launch", "simulate", "plan", "watch"])
def test_help_fits_the_terminal(command, monkeypatch, capsys):
  monkeypatch.setenv("COLUMNS", "80")
  assert main.main([command, "--help"]) == 0
  printed = capsys.readouterr().out
  assert max(map(len, printed.splitlines())) <= 80


def test_runs_as_a_module():
  done = _python("-m", "optax_dist", "--version", capture_output=True)
  assert done.returncode == 0, done.stderr
  assert done.stdout.startswith("optax-dist ")


def test_closed_pipe_prints_no_traceback():
  reader, writer = os.pipe()
  os.close(reader)
  try:
    done = _python(
      "-m", "optax_dist", "--version", stdout=writer, stderr=subprocess.PIPE
    )
  finally:
    os.close(writer)
  assert done.returncode == 1
  assert not done.stderr


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&- <&-"])
def test_closed_streams_print_no_traceback(closed):
  program = f"{sys.executable} -m optax_dist --version {closed}"
  done = subprocess.run(
    ["sh", "-c", program], timeout=300, text=True, capture_output=True
  )
  assert done.returncode == 0
  assert not done.stderr
  assert bool(done.stdout) == (closed == "2>&-")


def test_full_disk_is_reported_in_one_line():
  with open("/dev/full", "w") as full:
    done = _python(
      "-m", "optax_dist", "--version", stdout=full, stderr=subprocess.PIPE
    )
  assert done.returncode == 1
  assert done.stderr == (
    "optax-dist: the output can't be written: No space left on device\n"
  )


def test_a_name_that_the_terminal_can_not_show_is_escaped():
  done = _python(
    *("-m", "optax_dist", "report", "n\N{LATIN SMALL LETTER O WITH DIAERESIS}"),
    env=os.environ | {"PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"},
    capture_output=True,
  )
  assert done.returncode == 2
  assert done.stderr.startswith("optax-dist: n\\xf6: can't be read")


def test_closed_streams_are_replaced_by_null_devices():
  """A launched process has a null device there, not its line to the launcher."""
  script = (
    "import os, sys; from optax_dist.cli import main; main.main(['--version']);"
    "sys.exit(sum(not os.path.samestat(os.fstat(n), os.stat(os.devnull))"
    " for n in range(3)))"
  )
  done = subprocess.run(
    ["sh", "-c", f'{sys.executable} -c "{script}" <&- >&- 2>&-'], timeout=300
  )
  assert done.returncode == 0
