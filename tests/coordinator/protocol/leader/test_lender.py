"""The leader's ledger: a step that is told at once is what its events are."""

import random

import pytest

from optax_dist import ledger
from optax_dist.coordinator.protocol import messages as msg
from optax_dist.coordinator.protocol.config import Config
from optax_dist.coordinator.protocol.entries import Part
from optax_dist.coordinator.protocol.leader.lender import Lender
from optax_dist.ledger import rules

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


def part(incarnation, spans):
  return Part(incarnation, incarnation, 0, 0, 0, 1, 1.0, spans)


def history(data, seed, told):
  """Random steps; adds what the lender says to `told`."""
  r, lends = random.Random(seed), lender(data)
  out = {}
  for incarnation in range(MEMBERS):
    lends.ask(incarnation, 1)
  for _ in range(20):
    out |= {lease.incarnation: lease.spans for lease in lends.take_all()}
    told.append((dict(out), lends.state, lends.exhausted))
    if lends.exhausted:
      break
    come = r.sample(range(MEMBERS), r.choice((2, 3, 3, 3)))
    parts = []
    for incarnation in sorted(come):
      spans = out.get(incarnation, ())
      if not lends.fits(incarnation, arrive(spans)):
        continue
      lends.accept(incarnation, spans)
      parts.append(part(incarnation, lends.data(incarnation)))
    if r.random() < 0.2:
      lost = r.choice(sorted(out))
      lends.gone(lost, ())
      parts = [one for one in parts if one.incarnation != lost]
      lends.ask(lost, 1)
    if parts:
      tokens = {one.incarnation: 1 for one in parts}
      told.append(lends.commit(tuple(parts), tokens))


@pytest.mark.parametrize("mode", ["exact", "streaming"])
def test_a_usual_step_leaves_what_its_events_would_leave(monkeypatch, mode):
  quick = rules.usual
  taken = 0

  def counted(*args):
    nonlocal taken
    found = quick(*args)
    taken += found is not None
    return found

  for seed in range(60):
    epochs = (1, 2, None)[seed % 3]
    data = ledger.Batches(30 + seed, 6, seed=seed, epochs=epochs, mode=mode)
    one, other = [], []
    with monkeypatch.context() as patch:
      patch.setattr(rules, "usual", counted)
      history(data, seed, one)
      patch.setattr(rules, "usual", lambda *args: None)
      history(data, seed, other)
    assert one == other
  assert taken > 60


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
