"""What gradients that are not finite cost: the replica that has them, not others."""

import random

import pytest

from optax_dist import ledger
from optax_dist.ledger import spans as sp

BOTH = ledger.Members({"a": 0, "b": 1})


class Run:
  """A run of k of N replicas, some of which are bad, and some of its samples."""

  def __init__(self, data, k, holders, bad=(), samples=()):
    self.state = ledger.init(data, k)
    self.k, self.bad, self.samples = k, set(bad), set(samples)
    self.leases, self.accepted, self.steps = {}, {}, []
    self.dropped = dict.fromkeys(holders, 0)
    self.returned = 0
    self.do(ledger.Members({h: h for h in holders}))
    for holder in holders:
      self.do(ledger.Ask(holder))

  def do(self, *events):
    self.state, leases = ledger.step(self.state, *events)
    for lease in leases:
      self.leases[lease.holder] = lease.spans

  def deliver(self, holder):
    """A replica has computed on its lease; returns whether it had one."""
    spans = self.leases.pop(holder, ())
    if not spans or holder in self.accepted:
      return False
    if not ledger.fits(self.state, holder, spans):
      self.do(ledger.Drop(holder, spans, finite=self.is_finite(holder, spans)))
      self.do(ledger.Ask(holder))
    elif not self.is_finite(holder, spans):
      self.dropped[holder] += 1
      self.do(ledger.Drop(holder, spans, finite=False), ledger.Ask(holder))
    else:
      self.do(ledger.Accept(holder, spans))
      self.accepted[holder] = spans
    if len(self.accepted) >= self.k:
      self.commit()
    elif (other := ledger.swap(self.state)) is not None:
      self.returned += 1
      del self.accepted[other]
      self.do(ledger.Swap(other))
    return True

  def is_finite(self, holder, spans):
    numbers = {p for start, stop in spans for p in range(start, stop)}
    return holder not in self.bad and not numbers & self.samples

  def commit(self):
    parts, self.accepted = tuple(sorted(self.accepted.items())), {}
    self.steps.append(parts)
    self.do(ledger.Commit(parts, self.state.abandoned))
    for holder, _ in parts:
      self.do(ledger.Ask(holder))

  def go_on(self, order, most=5000):
    for holder in order:
      most -= 1
      if self.state.exhausted or not most:
        return
      self.deliver(holder)


def endless(r, holders, weights):
  while True:
    yield r.choices(holders, weights)[0]


@pytest.mark.parametrize("seed", range(60))
def test_a_bad_replica_takes_no_sample_from_the_others(seed):
  """However fast it is; if it is not needed, all steps are taken."""
  r = random.Random(seed)
  n = r.choice((2, 3, 4))
  holders = list(range(n))
  bad = r.sample(holders, min(r.randrange(1, n), n - 1, 2))
  k = r.randrange(1, n - len(bad) + 1)
  unit = r.choice((1, 3))
  data = ledger.Batches(
    k * unit * r.choice((1, 4, 9)) + r.randrange(k * unit),
    k * unit,
    epochs=r.choice((1, 3)),
    mode=r.choice(("exact", "streaming")),
    shuffle=False,
  )
  run = Run(data, k, holders, bad)
  weights = [r.choice((1, 1, 20)) if h in bad else 1 for h in holders]
  run.go_on(endless(r, holders, weights))
  assert run.state.exhausted
  assert len(run.steps) == data.total // data.global_batch
  assert run.state.progress.skipped == run.state.abandoned == ()


@pytest.mark.parametrize("seed", range(60))
def test_bad_samples_are_given_up(seed):
  r = random.Random(seed)
  n = r.choice((1, 2, 3, 4))
  k = r.choice((n, r.randrange(1, n + 1)))
  data = ledger.Batches(k * r.choice((2, 5)), k, epochs=2, shuffle=False)
  samples = r.sample(range(data.total), r.randrange(1, k + 2))
  run = Run(data, k, list(range(n)), samples=samples)
  run.go_on(endless(r, list(range(n)), [1] * n))
  assert run.state.exhausted
  skipped = sp.union(run.state.progress.skipped, run.state.abandoned)
  numbers = {p for start, stop in skipped for p in range(start, stop)}
  assert numbers <= set(samples)
  done = [p for parts in run.steps for _, spans in parts for p in spans]
  assert not {p for start, stop in done for p in range(start, stop)} & numbers


def test_a_sample_is_given_up_for_gradients_of_different_replicas():
  state = ledger.init(ledger.Batches(8, 1, shuffle=False), 1)
  state, _ = ledger.step(state, BOTH)
  for holder, given_up in (("a", ()), ("a", ()), ("a", ()), ("b", ((0, 1),))):
    claim = ledger.Claim(holder, ((0, 1),))
    drop = ledger.Drop(holder, ((0, 1),), finite=False)
    state, _ = ledger.step(state, claim, drop)
    assert state.abandoned == given_up


def test_a_replica_that_is_always_bad_and_alone_leaves_little():
  data = ledger.Batches(8, 2, epochs=None, mode="streaming", shuffle=False)
  run = Run(data, 1, [0], bad=[0])
  run.go_on(endless(random.Random(0), [0], [1]), 1000)
  assert run.state.cursor > 1000
  assert len(repr(run.state)) < 2000


def test_a_bad_replica_alone_gives_nothing_up_while_another_one_may_come():
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


def test_a_bad_replica_gets_only_what_others_compute_until_it_is_good():
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
