"""The simulation finds what is planted into the core, by the rule that it breaks."""

import dataclasses

import pytest

from tests.simulation import faults, planted, shrink

# So many schedules run at the most.
_MAX_SCHEDULES = 400


@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda f: f.name)
def test_planted_fault_is_found_by_its_rule(fault):
  result = planted.find(fault, _MAX_SCHEDULES)
  assert result is not None
  assert not fault.kind.run(result.schedule).violation  # Without the fault.


def test_planted_fault_without_a_matching_line_is_an_error():
  rotten = dataclasses.replace(planted.FAULTS[0], old="no.such()")
  with pytest.raises(ValueError, match="up to date"), planted.plant(rotten):
    pass


def test_failing_schedule_is_minimized():
  fault = next(f for f in planted.FAULTS if f.rule == "A9")
  result = planted.find(fault, _MAX_SCHEDULES)
  with planted.plant(fault):
    fails = lambda s: faults.run(s).violation.startswith(fault.rule)
    small = shrink.shrink(result.schedule, fails, most=60)
    assert fails(small)
  before = result.schedule
  assert len(small.faults) <= len(before.faults)
  assert small.setting.steps < before.setting.steps
  assert dataclasses.replace(small, seed=before.seed) == small
