"""The comparison with JAX's `live_devices`: what its cells say."""

import pytest

from tests.live_devices import __main__ as command


def seen(**changed):
  found = {
    "ended": [None, None],
    "victim": None,
    "back": None,
    "watched": 25.0,
    "steps": 400,
    "stall": 0.12,
    "silent": 0.1,
  }
  return found | changed


def test_a_run_that_stands_still_is_no_success():
  assert command.promised(seen(), "kill")
  assert not command.promised(seen(silent=20.0), "kill")
  assert not command.promised(seen(stall=20.0), "kill")
  assert not command.promised(seen(), "rejoin")
  assert command.promised(seen(back=2.0), "rejoin")
  # Without its store no run takes a step.
  assert not command.promised(seen(), "store")
  assert command.promised(seen(steps=0, silent=25.0), "store")


def test_unknown_rows_are_refused(capsys):
  with pytest.raises(SystemExit):
    command.main(["--only", "earthquake"])
  assert "must be some of kill,rejoin" in capsys.readouterr().err


@pytest.mark.nightly  # The whole table has its own job.
def test_a_cell_runs(capsys):
  flags = ["--only", "kill", "--columns", "k-of-n", "--seconds", "10"]
  assert command.main(flags) == 0
  out = capsys.readouterr().out
  assert "| a member is killed | steps go on, after" in out
