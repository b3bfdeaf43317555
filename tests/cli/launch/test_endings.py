"""`optax-dist launch` of replicas that end in all ways: its exit codes and lines."""

import os
import pathlib
import re

import pytest

from optax_dist.cli import main
from optax_dist.cli.runs import view
from optax_dist.coordinator.metrics import prometheus

_PROGRAM = str(pathlib.Path(__file__).with_name("ending_program.py"))
_TWO_RUNS = str(pathlib.Path(__file__).with_name("two_runs.py"))
_PAUSED = str(pathlib.Path(__file__).with_name("paused_replica.py"))
_ONE = ("--replicas", "2", "--min-replicas", "1")
_NOBODY = "no replica has joined; does the script call coordinator.join?"


@pytest.fixture(autouse=True)
def _without_job_variables(monkeypatch):
  for name in list(os.environ):
    if name.startswith("OPTAX_DIST_"):
      monkeypatch.delenv(name)
  monkeypatch.setenv("JAX_PLATFORMS", "cpu")


def _launch(capfd, tmp_path, flags, *ending):
  """Returns the launcher's exit code, its own lines, and all output."""
  code = main.main(["launch", *flags, _PROGRAM, str(tmp_path), *ending])
  out, err = capfd.readouterr()
  said = [line for line in err.splitlines() if line.startswith("[launch] ")]
  print(out, err)
  return code, said, out + err


@pytest.mark.parametrize("how", ["killed", "0"])
def test_replica_that_dies_before_it_joins_counts_as_lost(capfd, tmp_path, how):
  flags = (*_ONE, "--restarts", "0")
  code, said, text = _launch(capfd, tmp_path, flags, "1", "imports", how)
  assert code == 0
  words = {
    "killed": "was ended by SIGKILL",
    "0": "ended with exit code 0, and has not joined the run",
  }
  assert said[0] == f"[launch] replica 1 {words[how]}"
  assert "[replica 0] members 0" in text


def test_replica_that_never_joins_is_named_and_does_not_block_the_others(
  capfd, tmp_path, monkeypatch
):
  """Its process is alive, as if its imports hang; a step needs one replica."""
  monkeypatch.setenv("ENDING_TIMEOUT", "30")
  code, said, text = _launch(capfd, tmp_path, _ONE, "1", "imports", "hangs")
  assert code == 0
  assert said[0].startswith(
    "[launch] replica 1 has not joined, and others have; its process has been"
  )
  assert "steps go on without replica 1, which has never joined" in text
  assert "[replica 0] members 0" in text
  stopped = "is stopped: the run has ended, and it had not joined"
  assert said[-1] == f"[launch] replica 1 {stopped}"


def test_replica_that_exits_with_0_during_the_run_restarts(capfd, tmp_path):
  """It has not left: for the run it is lost, whatever its exit code."""
  code, said, text = _launch(capfd, tmp_path, _ONE, "1", "run", "exits", "once")
  assert code == 0
  assert said == [
    "[launch] replica 1 ended with exit code 0, and has not left the run",
    "[launch] replica 1 starts again (restart 1 of 10)",
  ]
  assert text.count("[replica 1] joined") == 2


def test_replica_that_exits_with_0_inside_its_block_has_left(capfd, tmp_path):
  """Steps need both, unless one leaves."""
  flags = ("--replicas", "2")
  code, said, text = _launch(capfd, tmp_path, flags, "1", "run", "0")
  assert (code, said) == (0, [])
  assert "[replica 0] members 0\n" in text


def test_replica_leaves_at_the_end_of_its_program_without_a_block(
  capfd, tmp_path
):
  flags = ("--replicas", "2")
  assert _launch(capfd, tmp_path, flags, "1", "forgets", "0")[:2] == (0, [])


def test_early_departure_does_not_end_the_run_for_later_replicas(
  capfd, tmp_path
):
  """As if its host was taken, and another one still began."""
  flags = ("--replicas", "2", "--replicas-to-aggregate", "1")
  code, said, text = _launch(capfd, tmp_path, flags, "1", "last", "comes")
  assert (code, said) == (0, [])
  assert text.count("[replica 1] members 1\n") == 7


def test_a_script_that_never_joins_is_an_error(capfd, tmp_path):
  flags = ("--replicas", "2")
  code, said, text = _launch(capfd, tmp_path, flags, "all", "imports", "0")
  assert code == 1
  assert sorted(said) == [
    f"[launch] replica {i} ended with exit code 0, and has not joined the run"
    for i in (0, 1)
  ]
  assert f"optax-dist: {_NOBODY}" in text


def test_run_that_needs_a_replica_that_never_joins_ends_at_once(
  capfd, tmp_path
):
  flags = ("--replicas", "2")
  code, _, text = _launch(capfd, tmp_path, flags, "1", "imports", "0")
  assert code == 1
  assert (
    "Only 1 of 2 needed replicas can go on: replica 1 ended with exit code 0, and has"
    " not joined the run after"
  ) in text


@pytest.mark.parametrize(
  ("which", "how", "expected"),
  [
    (
      "1",
      "killed",
      0,
    ),  # All steps are committed, and replica 0 has ended well.
    ("1", "3", 3),  # What a program says itself.
    ("all", "killed", 137),  # None has come to its end.
  ],
)
def test_exit_code_after_the_end_of_the_run_is_that_of_the_job(
  capfd, tmp_path, which, how, expected
):
  flags = ("--replicas", "2")
  code, said, _ = _launch(capfd, tmp_path, flags, which, "end", how)
  assert code == expected
  words = (
    "was ended by SIGKILL" if how == "killed" else "ended with exit code 3"
  )
  assert f"[launch] replica 1 {words}" in said
  assert not any("starts again" in line for line in said)


def test_replica_ends_if_one_of_its_processes_fails_before_joining(
  capfd, tmp_path
):
  """As where one makes its model: the others wait for it in a collective."""
  flags = ("--replicas", "1", "--processes-per-replica", "2", "--restarts", "0")
  code, said, text = _launch(capfd, tmp_path, flags, "0", "model", "raises")
  assert (code, said) == (1, ["[launch] replica 0.1 ended with exit code 1"])
  assert "[replica 0.1] ValueError: no data" in text
  assert "[replica 0.0] Traceback" not in text
  assert "ValueError: no data\nCorrect that" in text


def test_slow_exit_after_an_error_during_the_run_does_not_fail_the_job(
  capfd, tmp_path
):
  """A replica whose process takes seconds to exit counts as lost all the same."""
  code, said, _ = _launch(
    capfd, tmp_path, _ONE, "1", "run", "raises-and-is-slow"
  )
  assert (code, said) == (0, ["[launch] replica 1 ended with exit code 1"])


def test_watch_shows_the_end_of_a_failed_run(capfd, tmp_path):
  output = tmp_path / "out"
  flags = ("--replicas", "2", "--restarts", "0", "--output", str(output))
  code, _, text = _launch(capfd, tmp_path, flags, "1", "run", "raises")
  assert code == 1
  reason = (
    "Only 1 of 2 needed replicas can go on: replica 1 ended with exit code 1"
  )
  assert f"optax-dist: {reason}" in text
  path = output / "journal.jsonl"
  assert main.main(["watch", str(path)]) == 0
  assert f"; ended: its launcher has ended: {reason}" in capfd.readouterr().out
  shown = view.View(path)
  shown.read()
  assert "optax_dist_failed 1.0" in prometheus.text(shown.numbers.metrics())


def test_evaluation_that_checks_for_preemption_ends_in_time(capfd, tmp_path):
  flags = ("--replicas", "1")
  code, said, text = _launch(capfd, tmp_path, flags, "0", "evaluation", "looks")
  assert (code, said) == (143, [])
  assert "[replica 0] saves" in text


@pytest.mark.parametrize("processes", [1, 2])
def test_waiting_replica_leaves_within_its_grace_period(
  capfd, tmp_path, processes
):
  """All processes of the replica leave together."""
  flags = ("--replicas", "2", "--processes-per-replica", str(processes))
  flags += ("--grace", "10")
  code, said, text = _launch(capfd, tmp_path, flags, "1", "waits", "0")
  assert code == 143
  assert text.count(" leaves True 1\n") == processes
  assert not any("replica 0" in line for line in said)


def test_signal_to_one_process_of_a_replica_reaches_all(capfd, tmp_path):
  """As of a scheduler that takes one of its hosts."""
  flags = ("--replicas", "1", "--processes-per-replica", "2")
  code, _, text = _launch(capfd, tmp_path, flags, "0", "signal", "0")
  assert code == 0
  assert text.count(" leaves True True\n") == 2


def test_evaluation_that_ignores_preemption_is_named_before_it_is_killed(
  capfd, tmp_path
):
  flags = ("--replicas", "1", "--grace", "6")
  code, said, text = _launch(
    capfd, tmp_path, flags, "0", "evaluation", "sleeps"
  )
  assert code == 143
  assert said == [
    "[launch] replica 0 is killed: it has not ended within --grace (6 s)"
  ]
  assert (
    "[replica 0] SIGTERM came 3 s ago, and this program has neither come to the end"
    " of a step nor looked at replica.preempted"
  ) in text
  assert "in _evaluate" in text


def test_replica_that_dies_restarts_in_each_run_of_its_program(capfd):
  assert main.main(["launch", "--replicas", "2", _TWO_RUNS]) == 0
  out, err = capfd.readouterr()
  assert out.count(" second 6\n") == 2
  assert [line for line in err.splitlines() if "[launch]" in line] == [
    "[launch] replica 1 was ended by SIGKILL",
    "[launch] replica 1 starts again (restart 1 of 10)",
  ]


def test_replica_stopped_until_the_end_of_the_run_does_not_fail_the_job(
  capfd, tmp_path
):
  """All steps were taken, without it; nobody is left that has the parameters."""
  flags = ("--replicas", "2", "--replicas-to-aggregate", "1")
  code = main.main(["launch", *flags, _PAUSED, str(tmp_path)])
  out, err = capfd.readouterr()
  assert code == 0, err
  assert "[replica 0] step 8" in out
  assert re.search("RunFinished: .*replica 1 has only the parameters of", err)
