"""The simulation finds what is planted into the protocol, and shrinks it."""

import dataclasses

import pytest

from tests.simulation import faults, planted, planted_faults, shrink

# So many schedules run where the recorded one no longer finds a fault.
_MOST = 5000


def test_names_are_unique_as_recorded_seeds_need():
  names = [fault.name for fault in planted_faults.FAULTS]
  assert len(names) == len(set(names))
  assert planted.recorded_seeds().keys() <= set(names)


@pytest.mark.parametrize("fault", planted_faults.FAULTS, ids=lambda f: f.name)
def test_a_planted_fault_is_found(fault):
  found = planted.find(fault, _MOST)
  assert found is not None
  assert not fault.kind.run(found.schedule).violation  # Without the fault.


def test_a_fault_that_has_no_place_is_an_error():
  rotten = planted.Planted("rotten", (("log", "no such text", ""),))
  with pytest.raises(ValueError, match="up to date"), planted.plant(rotten):
    pass


def test_a_failing_schedule_is_made_smaller():
  fault = next(f for f in planted_faults.FAULTS if "token" in f.name)
  with planted.plant(fault):
    found = planted.find(fault, 50)
    fails = lambda s: faults.run(s).violation.startswith("A9")
    small = shrink.shrink(found.schedule, fails, most=60)
    assert fails(small)
  before = found.schedule
  assert len(small.faults) <= len(before.faults)
  assert small.setting.steps < before.setting.steps
  assert dataclasses.replace(small, seed=before.seed) == small
