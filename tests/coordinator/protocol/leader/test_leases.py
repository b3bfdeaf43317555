"""The lease manager: which gradients may be accepted."""

from optax_dist import ledger
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.leader.leases import LeaseManager


def arrive(spans, count=1):
  return msg.Arrive(
    0, 0, count, count, True, 0, None, b"", "", None, b"", spans
  )


def test_a_gradient_must_be_on_the_samples_of_its_lease():
  lends = LeaseManager(ledger.Batches(60, 6), 3, ledger.Progress())
  lends.ask(0, 1)
  lends.ask(1, 1)
  mine, theirs = (ask.lease for ask in lends.announcements())
  assert lends.fits(0, arrive(mine))
  assert not lends.fits(0, arrive(theirs))
  assert not lends.fits(0, arrive(mine, count=2))
  assert not lends.fits(0, arrive(()))
  lends.accepted(0, arrive(mine), 0.0)
  assert not lends.fits(0, arrive(mine))
  assert lends.data(0) == mine
  assert lends.state.held[0] == ledger.Held((), mine, 0)
