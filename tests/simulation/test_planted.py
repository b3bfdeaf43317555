"""The simulation finds what is planted into the protocol, and shrinks it."""

import dataclasses

import pytest

from tests.simulation import faults, planted, shrink

# All are found within 20,000 schedules (`--planted all`); here is time for those
# that take fewer than this, and a check of the seeds of the others.
_MOST = 120
_LATER = {
  "terms are trimmed like other records (the old loss of safety)": 234,
  "who claims leadership forgets the fence": 173,
  "what was computed ahead is published, whatever is decided": 477,
  "an idle leader never learns that it was replaced": 1358,
  "a lost member is not noticed": 506,
}


def test_there_are_enough():
  assert len(planted.FAULTS) >= 20
  assert len({fault.name for fault in planted.FAULTS}) == len(planted.FAULTS)


@pytest.mark.parametrize("fault", planted.FAULTS, ids=lambda f: f.name)
def test_a_planted_fault_is_found(fault):
  first = _LATER.get(fault.name, 0)
  found = planted.find(fault, first, 1 if first else _MOST)
  assert found is not None
  assert not faults.run(found.schedule).violation  # Without the fault.


def test_a_fault_that_has_no_place_is_an_error():
  rotten = planted.Planted("rotten", (("log", "no such text", ""),))
  with pytest.raises(ValueError, match="up to date"), planted.plant(rotten):
    pass


def test_a_failing_schedule_is_made_smaller():
  fault = next(f for f in planted.FAULTS if "token" in f.name)
  with planted.plant(fault):
    found = planted.find(fault, 0, 50)
    fails = lambda s: faults.run(s).violation.startswith("A9")
    small = shrink.shrink(found.schedule, fails, most=60)
    assert fails(small)
  before = found.schedule
  assert len(small.faults) <= len(before.faults)
  assert small.setting.steps < before.setting.steps
  assert dataclasses.replace(small, seed=before.seed) == small
