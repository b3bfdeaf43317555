"""The leader's ledger: which gradients may be accepted."""

from optax_dist import ledger
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.leader.lender import Lender

MEMBERS = 3


def lender(data):
  config = Config(
    "p0",
    0,
    "at p0",
    replicas_to_aggregate=MEMBERS,
    total_num_replicas=MEMBERS,
    data=data,
  )
  return Lender(config, ledger.Progress())


def arrive(spans, count=1):
  return msg.Arrive(
    0, 0, count, count, True, 0, None, b"", "", None, b"", spans
  )


def test_a_gradient_must_be_on_the_samples_of_its_lease():
  lends = lender(ledger.Batches(60, 6))
  lends.ask(0, 1)
  lends.ask(1, 1)
  mine, theirs = lends.take(0), lends.take(1)
  assert lends.fits(0, arrive(mine))
  assert not lends.fits(0, arrive(theirs))
  assert not lends.fits(0, arrive(mine, count=2))
  assert not lends.fits(0, arrive(()))
  lends.accept(0, mine)
  assert not lends.fits(0, arrive(mine))
  assert lends.data(0) == mine
  assert lends.state.held[0] == ledger.Held((), mine, 0)
