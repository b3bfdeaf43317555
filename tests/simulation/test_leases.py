"""Runs whose samples are leased: schedules, and faults that they must find."""

import pytest

from tests.simulation import leases, planted

_BATCH = 150

FAULTS = (
  (
    "a sample counts twice: what is sent is taken in",
    "leader.leases",
    "    if sp.size(message.data) != message.count * self.state.unit:\n",
    "    self._step(ledger.Claim(incarnation, message.data))\n"
    "    if not ledger.fits(self.state, incarnation, message.data):\n"
    "      inside = self.data(incarnation)\n"
    "      mine = ledger.Held(message.data, inside)\n"
    "      held = self.state.held | {incarnation: mine}\n"
    "      self.state = self.state._replace(held=held)\n"
    "    if sp.size(message.data) != message.count * self.state.unit:\n",
  ),
  (
    "what is committed is not in what a replica starts with",
    "membership",
    "      self.ended,\n      self.progress,\n",
    "      self.ended,\n",
  ),
  (
    "a replica is not told of its samples",
    "leader.leader",
    "      self._say(state, msg.Asked(inside, ask.gradients, ask.lease))",
    "      pass",
  ),
  (
    "samples of a sum are drawn again",
    "submission",
    "      if len(self.gradients) == self._sent and not self._round:\n",
    "      if True:\n",
  ),
  (
    "only the last gradient's samples are submitted",
    "submission",
    "      sp.join(*(gradient.data for gradient in found)),\n",
    "      sp.join(*(gradient.data for gradient in found[-1:])),\n",
  ),
  (
    "the samples of all but the last local step are forgotten",
    "submission",
    "      self._round.append(self.drawn)\n",
    "      self._round = [self.drawn]\n",
  ),
  (
    "a step of shares may be larger than the others",
    "leader.leader",
    "    finite = message.finite\n",
    "    finite = message.finite\n"
    "    config = self._quorum.config._replace(exact=False)\n"
    "    self._quorum = self._quorum._replace(config=config)\n",
  ),
)


@pytest.mark.parametrize("batch", range(4))
def test_no_guarantee_is_violated(batch):
  bad = []
  steps = 0
  for seed in range(batch * _BATCH, (batch + 1) * _BATCH):
    result = leases.run(leases.schedule(seed))
    steps += result.steps
    if result.violation:
      bad.append((seed, result.violation))
  command = "python -m tests.simulation --leases --replay"
  assert not bad, f"{command} {bad[0][0]}: {bad}"
  assert steps > 5 * _BATCH  # Most runs come to their end.


_HOLDS = {
  "the end waits for replicas that are behind": 9100068,
  "it waits from when the last step is in the log": 8501000219,
  "a run that fails has no leases that could be wrong": 8800048,
}


@pytest.mark.parametrize("what", _HOLDS)
def test_what_long_runs_have_found_holds(what):
  assert not leases.run(leases.schedule(_HOLDS[what])).violation


@pytest.mark.parametrize("fault", FAULTS, ids=[f[0] for f in FAULTS])
def test_a_planted_fault_is_found(fault):
  name, *change = fault
  found = planted.find(planted.Planted(name, (tuple(change),), leases), 0, 100)
  assert found is not None
  assert not leases.run(found.schedule).violation  # Without the fault.
