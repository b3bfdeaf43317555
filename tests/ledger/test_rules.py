"""The ledger's rules, in single events and in random histories."""

import random

import pytest

from optax_dist import ledger
from optax_dist.ledger import spans as sp


def listed(spans):
  return [p for start, stop in spans for p in range(start, stop)]


class Run:
  """Drives a ledger as a coordinator does, and checks it against plain sets."""

  def __init__(self, data, gradients, progress=None):
    self.data, self.need = data, gradients
    self.state = ledger.init(data, gradients, progress)
    self.leases = {}
    self.accepted = {}
    self.done = []
    self.steps = []

  def step(self, event):
    self.state, leases = ledger.step(self.state, event)
    for lease in leases:
      assert sp.size(lease.spans) % self.state.unit == 0
      self.leases[lease.holder] = lease.spans
      self.check_epoch(lease)
    self.check()
    return leases

  def check(self):
    state = self.state
    held = dict(state.held.items())
    ins = [p for h in held.values() for p in listed(h.accepted)]
    outs = {p for h in held.values() for p in listed(h.out)}
    free = listed(state.pool) + listed(state.doubtful) + listed(state.abandoned)
    assert len(ins) == len(set(ins))
    assert len(free) == len(set(free))
    assert not set(ins) & outs
    assert not set(free) & (outs | set(ins))
    uncommitted = set(range(state.cursor)) - set(self.done)
    assert uncommitted == outs | set(ins) | set(free)
    single = [p for h in held.values() if not h.copied for p in listed(h.out)]
    assert len(single) == len(set(single))
    assert state.progress.done == len(self.done)

  def check_epoch(self, lease):
    """In exact mode no epoch begins before the last one is nearly used up."""
    copied = self.state.held.get(lease.holder).copied
    if self.data.mode == "exact" and not copied:
      size = self.data.per_epoch
      for start, stop in lease.spans:
        for epoch in range(start // size, (stop - 1) // size + 1):
          before = epoch * size - sum(p < epoch * size for p in self.done)
          before -= sp.size(self.state.abandoned)
          assert before < self.need * self.state.unit

  def submit(self, holder):
    spans = self.leases.get(holder, ())
    if not ledger.fits(self.state, holder, spans):
      self.step(ledger.Ask(holder))
      return False
    self.step(ledger.Accept(holder, spans))
    self.accepted[holder] = spans
    return True

  def commit(self):
    parts = tuple(sorted(self.accepted.items()))
    skipped = self.state.abandoned
    spans = [p for _, part in parts for p in listed(part)]
    self.done += spans + listed(skipped)
    assert len(self.done) == len(set(self.done)), "a sample counts twice"
    self.steps.append(spans)
    self.accepted = {}
    self.step(ledger.Commit(parts, skipped))
    for holder, _ in parts:
      self.step(ledger.Ask(holder))


def history(seed):
  """A run with backups, losses, drops and changes of need, to its end."""
  r = random.Random(seed)
  gradients = r.choice((1, 2, 3))
  unit = r.choice((1, 2, 3))
  data = ledger.Batches(
    r.randrange(gradients * unit, 40),
    gradients * unit,
    seed=seed,
    epochs=r.choice((1, 2, 3)),
    mode=r.choice(("exact", "streaming")),
  )
  run = Run(data, gradients)
  live = list(range(gradients + r.choice((0, 1, 2))))
  for holder in live:
    run.step(ledger.Ask(holder))
  faults = r.choice((0, 0, 20, 60))
  names = len(live)
  poison = r.random() < 0.2
  for _ in range(4000):
    if run.state.exhausted and not run.accepted:
      break
    if len(run.accepted) >= run.need:
      run.commit()
      continue
    holder = r.choice(live)
    kind = r.random() if faults else 1.0
    faults -= kind < 0.25
    if kind < 0.08:
      # It dies, and another one takes its place.
      live.remove(holder)
      run.accepted.pop(holder, None)
      run.leases.pop(holder, None)
      run.step(ledger.HolderLost(holder))
      live.append(names)
      run.step(ledger.Ask(names))
      names += 1
    elif kind < 0.16 and holder in run.leases:
      if holder not in run.accepted:
        run.step(ledger.Drop(holder, run.leases[holder], not poison))
        run.step(ledger.Ask(holder))
    elif kind < 0.18:
      run.need = r.randrange(1, gradients + 1)
      run.step(ledger.Need(run.need))
    elif kind < 0.2:
      # Another coordinator begins with what is committed, and what it is told.
      run.accepted = {}
      told = Run(data, gradients, run.state.progress)
      told.need, told.done = run.need, run.done
      told.step(ledger.Need(run.need))
      told.steps = run.steps
      for one in live:
        spans = run.leases.get(one, ())
        told.leases[one] = spans
        told.step(ledger.Claim(one, spans))
      run = told
    elif holder not in run.accepted and len(run.accepted) < run.need:
      run.submit(holder)
  else:
    pytest.fail(f"seed {seed}: no end of it: {run.state}")
  return run


@pytest.mark.parametrize("block", range(8))
def test_each_sample_is_in_one_committed_step(block):
  ends = 0
  for seed in range(block * 25, block * 25 + 25):
    run = history(seed)
    state = run.state
    assert state.left < run.need * state.unit
    reports = ledger.report(run.data, state.progress)
    for one in reports:
      size = run.data.num_samples
      numbers = [*one.left_out, *one.skipped, *one.open]
      assert one.committed + len(numbers) == size
    ends += state.left == 0
  assert ends > 5


def test_an_exact_epoch_ends_before_the_next_begins():
  """With backups, and with every replica as slow as it likes."""
  data = ledger.Batches(13, 4, epochs=3)
  r = random.Random(0)
  run = Run(data, 2)
  for holder in range(4):
    run.step(ledger.Ask(holder))
  while not run.state.exhausted:
    holder = r.randrange(4)
    if holder not in run.accepted:
      run.submit(holder)
    if len(run.accepted) == 2:
      run.commit()
  epochs = [{p // 12 for p in step} for step in run.steps]
  assert epochs == [{0}] * 3 + [{1}] * 3 + [{2}] * 3
  assert run.state.left == 0


def test_samples_that_are_not_leased_are_not_accepted():
  state = ledger.init(ledger.Batches(8, 2), 2)
  state, _ = ledger.step(state, ledger.Ask("a"))
  assert not ledger.fits(state, "a", ())
  with pytest.raises(ValueError, match="not leased to 'a'"):
    ledger.step(state, ledger.Accept("a", ((1, 2),)))
  with pytest.raises(ValueError, match="No gradient of 'a'"):
    ledger.step(state, ledger.Commit((("a", ((0, 1),)),)))


def submitted(run, r, holder):
  """Submits all of a lease, or its first gradient, and asks for nothing."""
  held = run.state.held.get(holder, ledger.Held())
  count = r.choice((run.state.unit, sp.size(held.out)))
  part = sp.head(held.out, count)[0]
  if part and ledger.fits(run.state, holder, part):
    others = {h: one.out for h, one in run.state.held.items() if h != holder}
    run.step(ledger.Accept(holder, part))
    run.accepted[holder] = sp.join(run.accepted.get(holder, ()), part)
    now = run.state.held[holder]
    assert listed(now.accepted) == listed(run.accepted[holder])
    assert listed(now.out) == listed(held.out)[sp.size(part) :]
    assert now.copied == (held.copied and bool(now.out))
    # Whoever computes on the same samples has lost them, and nothing else.
    for other, out in others.items():
      left = [p for p in listed(out) if p not in listed(part)]
      assert listed(run.state.held.get(other, ledger.Held()).out) == left


def test_a_claim_is_granted_if_nothing_stands_against_it():
  granted = 0
  for seed in range(400):
    r = random.Random(seed)
    epochs, mode = r.choice((1, 2, None)), r.choice(("exact", "streaming"))
    data = ledger.Batches(9, 4, epochs=epochs, mode=mode)
    run = Run(data, r.choice((2, 4)))
    for _ in range(r.randrange(25)):
      holder, kind = r.choice("abc"), r.random()
      held = run.state.held.get(holder, ledger.Held())
      if kind < 0.5:
        submitted(run, r, holder)
      elif kind < 0.65 and held.out:
        run.step(ledger.Drop(holder, held.out, finite=False))
      elif kind < 0.75 and run.accepted:
        run.commit()
      else:
        run.step(ledger.Ask(holder, r.choice((1, 2))))
    state, holder = run.state, r.choice("abcd")
    own = state.held.get(holder, ledger.Held())
    start = r.randrange(14)
    spans = r.choice(
      (
        own.out,
        sp.head(own.out, state.unit)[0],
        sp.head(state.pool, state.unit)[0],
        sp.head(state.doubtful, state.unit)[0],
        sp.head(state.abandoned, state.unit)[0],
        sp.head(own.accepted, state.unit)[0],
        ((start, start + state.unit),),
        ((start, start + 1),),
        ((start + 3, start + 4), (start, start + 1)),
        ((start, start + 1), (start, start + 1)),
        ((state.cursor, state.cursor + state.unit),),
        (),
      )
    )
    wanted = listed(spans)
    taken = [
      p
      for h, o in state.held.items()
      if h != holder
      for p in listed(o.out) + listed(o.accepted)
    ]
    taken += listed(own.accepted) + listed(state.abandoned) + run.done
    free = (
      wanted
      and len(set(wanted)) == len(wanted)
      and not set(wanted) & set(taken)
      and len(wanted) % state.unit == 0
      and (state.limit is None or max(wanted) < state.limit)
    )
    leases = run.step(ledger.Claim(holder, spans))
    now = run.state.held.get(holder, ledger.Held())
    assert now.accepted == own.accepted
    if free:
      granted += 1
      assert (now.out, now.copied) == (spans, False)
      assert holder not in [h for h, _ in run.state.waiting]
      assert holder not in [lease.holder for lease in leases]
    else:
      waits = [h for h, _ in run.state.waiting].count(holder)
      assert waits + [one.holder for one in leases].count(holder) == 1
      if waits:
        assert now.out == ()
  assert granted > 80
