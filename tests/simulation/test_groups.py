"""Replicas of several processes: schedules, and faults that they must find."""

import dataclasses

import pytest

from tests.simulation import group_leases, groups, planted

_BATCH = 100

FAULTS = (
  (
    "a mean is there as soon as one process has it",
    "    if found.done == self._everyone and not found.told:",
    "    if not found.told:",
  ),
  (
    "only process 0 looks whether numbers are finite",
    "    finite = mine.finite and all(r.finite for r in self._ready.values())",
    "    finite = mine.finite",
  ),
  (
    "the others are not told of a snapshot",
    "        self._tell(orders.RestoreState(step, transfer))\n",
    "",
  ),
)


@pytest.mark.parametrize("batch", range(3))
def test_no_guarantee_is_violated(batch):
  bad = []
  steps = 0
  for seed in range(batch * _BATCH, (batch + 1) * _BATCH):
    result = groups.run(groups.schedule(seed))
    steps += result.steps
    if result.violation:
      bad.append((seed, result.violation))
  command = "python -m tests.simulation --groups --replay"
  assert not bad, f"{command} {bad[0][0]}: {bad}"
  assert steps > 6 * _BATCH  # Most runs come to their end.


@pytest.mark.parametrize(
  ("name", "old", "new"), FAULTS, ids=[f[0] for f in FAULTS]
)
def test_a_planted_fault_is_found(name, old, new):
  fault = planted.Planted(name, (("speaker", old, new),))
  found = planted.find(dataclasses.replace(fault, kind=groups), 0, 150)
  assert found is not None
  assert not groups.run(found.schedule).violation  # Without the fault.


def test_samples_that_were_given_up_after_the_last_step_are_not_left():
  assert not groups.run(group_leases.schedule(9010001552)).violation
