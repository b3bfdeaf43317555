"""Faults strike real processes: a short matrix.

`python -m tests.chaos --seeds 0:300` is the long matrix.
"""

import pathlib
import subprocess
import sys

import pytest

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
def test_faults_hang_no_replica_and_keep_them_equal(tmp_path, seeds):
  """In a process of its own, from which replicas can be forked."""
  command = [sys.executable, "-m", "tests.chaos", "--output", str(tmp_path)]
  done = subprocess.run(
    [*command, "--seeds", ",".join(map(str, seeds))],
    cwd=pathlib.Path(__file__).parents[3],
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stdout + done.stderr
  for seed in seeds:
    assert f"seed {seed}, {chaos_cases.case(seed)}: " in done.stdout
  every = len(seeds)
  assert f"{every} ok, 0 ended early, 0 diverged, 0 not" in done.stdout
