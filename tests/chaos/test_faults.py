"""Faults strike real processes: a short matrix.

`python -m tests.chaos --seeds 0:300` is the long matrix.
"""

import pathlib
import subprocess
import sys

import pytest

from optax_dist.coordinator import journal
from tests.chaos import cases as chaos_cases

# Each fault, of replicas and of the coordinator; what a fault does in which phase
# is simulated, and each phase is struck nightly. The last ones are outages: all are
# stopped for longer than anybody waits; one, for longer than its own deadlines.
_SEEDS = (2, 1, 17, 18, 35, 42, 56, 4)
_NIGHTLY_SEEDS = (0, 6, 8, 10, 81, 55, 66, 9)


def test_the_short_matrix_has_each_phase_and_fault():
  cases = [chaos_cases.case(seed) for seed in _SEEDS]
  nightly = [chaos_cases.case(seed) for seed in _NIGHTLY_SEEDS]
  phases = {case.phase for case in (*cases, *nightly)}
  assert phases == {*chaos_cases.PHASES, chaos_cases.OUTAGE}
  faults = {case.fault for case in cases}
  assert faults == {*chaos_cases.FAULTS, "pause-all"}
  for fault in ("kill", "stop"):
    assert {c.who for c in cases if c.fault == fault} == set(chaos_cases.WHO)


@pytest.mark.parametrize(
  "seeds",
  [_SEEDS, pytest.param(_NIGHTLY_SEEDS, marks=pytest.mark.nightly)],
  ids=["short", "long"],
)
def test_replicas_neither_hang_nor_differ_under_faults(tmp_path, seeds):
  out = _run("--output", tmp_path, "--seeds", ",".join(map(str, seeds)))
  for seed in seeds:
    assert f"seed {seed}, {chaos_cases.case(seed)}: " in out
  every = len(seeds)
  assert f"{every} ok, 0 ended early, 0 diverged, 0 not" in out


@pytest.mark.nightly  # tests/coordinator/runs/test_groups.py has one kill.
def test_run_survives_a_kill_of_a_process_or_the_coordinator(tmp_path):
  several = ("--processes-per-replica", 2, "--seeds", "22,31,40")
  out = _run("--output", tmp_path, *several)
  assert "seed 22, reduce_scatter/kill/replica/0.1" in out
  assert "seed 31, gather/kill/coordinator/0.1" in out
  assert "seed 40, done/kill/replica/1.0" in out
  assert "3 ok, 0 ended early, 0 diverged, 0 not" in out
  # Each was alone while the other one came back.
  for seed, alone in ((22, (1,)), (40, (0,))):
    records, _ = journal.read(tmp_path / f"run-{seed}" / "journal.jsonl")
    commits = [r for r in records if r["kind"] == "commit"]
    members = {tuple(m["replica"] for m in r["members"]) for r in commits}
    assert members == {alone, (0, 1)}


def _run(*arguments):
  """What the command prints, in a process from which replicas can be forked."""
  done = subprocess.run(
    [sys.executable, "-m", "tests.chaos", *map(str, arguments)],
    cwd=pathlib.Path(__file__).parents[2],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  return done.stdout
