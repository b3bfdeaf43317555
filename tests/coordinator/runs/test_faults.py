"""Faults strike real processes: a short matrix.

`python -m tests.chaos --seeds 0:300` is the long matrix.
"""

import pytest

from tests.chaos import cases as chaos_cases
from tests.chaos import run as chaos_run

# Each fault, of replicas and of leaders; what a fault does in which phase is
# simulated, and each phase is struck nightly. The last ones are outages: all are
# stopped for longer than a leader waits; one, for longer than its own patience.
_SEEDS = (2, 1, 17, 18, 35, 42, 56, 4)
_NIGHTLY_SEEDS = (0, 6, 8, 10, 81, 55, 66, 9)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
  with chaos_run.Pool(tmp_path_factory.mktemp("chaos")) as made:
    yield made
  assert made.orphans() == []


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
  "seed",
  [
    *_SEEDS,
    *(pytest.param(s, marks=pytest.mark.nightly) for s in _NIGHTLY_SEEDS),
  ],
  ids=lambda s: str(chaos_cases.case(s)),
)
def test_a_fault_hangs_no_replica_and_keeps_them_equal(pool, seed):
  result = chaos_run.run(pool, chaos_cases.case(seed))
  assert result.problems == []
  assert result.struck
  assert result.steps >= 6
