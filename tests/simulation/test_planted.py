"""The simulation finds what is planted into the protocol, and shrinks it."""

import dataclasses

import pytest

from tests.simulation import faults, planted, shrink

# Each is found within so many schedules, from the seed given or from 0; where a
# change of the core moves that, `--planted all` says where they are found now.
_MOST = 800
_FIRST = {
  "a gap in the log is jumped over": 1000,
  "more is summed than was asked for after a partial sum": 1500,
  "a replica of another optimizer is let in": 600,
}
# Found too late for a test: `--planted all` looks through 20,000 schedules.
_RARE = (
  "a late fingerprint takes back a request for a snapshot",
  # Found twice in thousands, or not yet.
  "a welcome to an earlier call is accepted",
  "a run that fails takes steps",
  "two processes with one number replace each other for ever",
)


def test_there_are_enough():
  assert len(planted.FAULTS) >= 20
  assert len({fault.name for fault in planted.FAULTS}) == len(planted.FAULTS)


@pytest.mark.parametrize(
  "fault",
  [f for f in planted.FAULTS if f.name not in _RARE],
  ids=lambda f: f.name,
)
def test_a_planted_fault_is_found(fault):
  found = planted.find(fault, _FIRST.get(fault.name, 0), _MOST)
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
