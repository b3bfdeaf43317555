"""Runs of learners that never wait: schedules, and faults that they must find."""

import pytest

from tests.simulation import fragments, planted

_BATCH = 100

FAULTS = (
  (
    "contributions count alike, whatever is in them",
    "rounds",
    "      codec.replace(part, weight=share * len(parts))\n",
    "      codec.replace(part, weight=1.0)\n",
  ),
  (
    "what is in a contribution is not sent again",
    "follower.follower",
    "        pending.work,\n",
    "        pending.work if self._office < 0 else b'',\n",
  ),
  (
    "a contribution to a round that is over is kept for the next",
    "leader.leader",
    "    local_step = message.local_step\n    held =",
    "    local_step = max(message.local_step, self._quorum.step)\n    held =",
  ),
)


@pytest.mark.parametrize("batch", range(3))
def test_no_guarantee_is_violated(batch):
  bad = []
  steps = 0
  for seed in range(batch * _BATCH, (batch + 1) * _BATCH):
    result = fragments.run(fragments.schedule(seed))
    steps += result.steps
    if result.violation:
      bad.append((seed, result.violation))
  command = "python -m tests.simulation --fragments --replay"
  assert not bad, f"{command} {bad[0][0]}: {bad}"
  assert steps > 8 * _BATCH  # Most runs come to their end.


@pytest.mark.parametrize("fault", FAULTS, ids=[f[0] for f in FAULTS])
def test_a_planted_fault_is_found(fault):
  name, *change = fault
  planted_one = planted.Planted(name, (tuple(change),), fragments)
  found = planted.find(planted_one, 0, 100)
  assert found is not None
  assert not fragments.run(found.schedule).violation  # Without the fault.
