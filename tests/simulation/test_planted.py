"""The simulation finds what is planted into the protocol, and shrinks it."""

import dataclasses

import pytest

from tests.simulation import faults, planted, planted_faults, shrink

# Each is found within so many schedules, from the seed given or from 0; where a
# change of the core moves that, `--planted all` says where they are found now.
_MOST = 800
_FIRST = {
  "a buffered sum survives its leader": 3800,
  "a position that a stranger has taken is taken for a gap": 3100,
  "a replica of another optimizer is let in": 600,
  "a report of an earlier attempt counts for this one": 1900,
  "a run that fails takes steps": 1000,
  "a submission that comes twice counts twice": 1500,
  "a welcome to an earlier call is accepted": 1500,
}


def test_there_are_enough():
  assert len(planted_faults.FAULTS) >= 20
  assert len({fault.name for fault in planted_faults.FAULTS}) == len(
    planted_faults.FAULTS
  )


@pytest.mark.parametrize(
  "fault",
  planted_faults.FAULTS,
  ids=lambda f: f.name,
)
def test_a_planted_fault_is_found(fault):
  found = planted.find(fault, _FIRST.get(fault.name, 0), _MOST)
  assert found is not None
  assert not fault.kind.run(found.schedule).violation  # Without the fault.


def test_a_fault_that_has_no_place_is_an_error():
  rotten = planted.Planted("rotten", (("log", "no such text", ""),))
  with pytest.raises(ValueError, match="up to date"), planted.plant(rotten):
    pass


def test_a_failing_schedule_is_made_smaller():
  fault = next(f for f in planted_faults.FAULTS if "token" in f.name)
  with planted.plant(fault):
    found = planted.find(fault, 0, 50)
    fails = lambda s: faults.run(s).violation.startswith("A9")
    small = shrink.shrink(found.schedule, fails, most=60)
    assert fails(small)
  before = found.schedule
  assert len(small.faults) <= len(before.faults)
  assert small.setting.steps < before.setting.steps
  assert dataclasses.replace(small, seed=before.seed) == small
