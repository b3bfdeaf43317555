"""Nonfinite gradients cost their own replica samples, and no other replica."""

from optax_dist import ledger
from optax_dist.ledger import spans as sp

BOTH = ledger.Members({"a": 0, "b": 1})


def test_sample_is_skipped_after_nonfinite_gradients_of_different_replicas():
  state = ledger.init(ledger.Batches(8, 1, shuffle=False), 1)
  state, _ = ledger.step(state, BOTH)
  for holder, given_up in (("a", ()), ("a", ()), ("a", ()), ("b", ((0, 1),))):
    claim = ledger.Claim(holder, ((0, 1),))
    drop = ledger.Drop(holder, ((0, 1),), finite=False)
    state, _ = ledger.step(state, claim, drop)
    assert state.abandoned == given_up


def test_lone_nonfinite_replica_leaves_few_samples():
  data = ledger.Batches(8, 1, epochs=None, mode="streaming", shuffle=False)
  state, leases = ledger.step(
    ledger.init(data, 1), ledger.Members({"a": 0}), ledger.Ask("a")
  )
  for _ in range(1000):
    drop = ledger.Drop("a", leases[-1].spans, finite=False)
    state, leases = ledger.step(state, drop, ledger.Ask("a"))
  assert state.cursor > 100
  assert len(repr(state)) < 2000


def test_lone_nonfinite_replica_skips_nothing_while_others_may_join():
  state = ledger.init(ledger.Batches(40, 4, shuffle=False), 1)
  members = ledger.Members({0: 0}, expected=1)
  state, leases = ledger.step(state, members, ledger.Ask(0))
  for _ in range(100):
    drop = ledger.Drop(0, leases[-1].spans, finite=False)
    state, leases = ledger.step(state, drop, ledger.Ask(0))
  assert state.abandoned == ()
  # The run has diverged: it was the only one.
  state, _ = ledger.step(state, ledger.Members({0: 0}))
  for _ in range(100):
    if state.exhausted:
      break
    drop = ledger.Drop(0, leases[-1].spans, finite=False)
    state, leases = ledger.step(state, drop, ledger.Ask(0))
  assert sp.size(state.abandoned) == 40


def test_nonfinite_replica_gets_only_samples_that_others_compute_too():
  state = ledger.init(ledger.Batches(40, 1, shuffle=False), 1)
  state, leases = ledger.step(state, BOTH, ledger.Ask("b"), ledger.Ask("a"))
  theirs, own = leases
  for _ in range(3):
    drop = ledger.Drop("a", own.spans, finite=False)
    state, (own,) = ledger.step(state, drop, ledger.Ask("a"))
  assert own.spans == theirs.spans
  assert ledger.is_blocked(state, "a")
  assert not ledger.is_blocked(state, "b")
  # The other one was faster, but it is good again.
  state, _ = ledger.step(state, ledger.Accept("b", theirs.spans))
  state, _ = ledger.step(state, ledger.Commit((("b", theirs.spans),)))
  ask = ledger.Ask("b")
  state, (theirs,) = ledger.step(state, ledger.Drop("a", ((0, 1),), True), ask)
  state, (own,) = ledger.step(state, ledger.Ask("a"))
  assert not ledger.is_blocked(state, "a")
  assert not sp.overlap(own.spans, theirs.spans)
