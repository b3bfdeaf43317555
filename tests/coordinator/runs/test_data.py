"""Tests of leased samples: each is in one committed step, under all faults."""

import collections
import contextlib
import itertools
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import coordinator, ledger
from optax_dist.coordinator import checkpoint
from optax_dist.coordinator import journal as journals
from optax_dist.coordinator.aggregation import means
from optax_dist.simulate import replay_run

PARAMS = jnp.zeros(4)


class Inbox:
  """The committed samples, as the replicas report them."""

  def __init__(self, data):
    self.data = data
    self.lock = threading.Lock()
    self.steps = collections.defaultdict(list)

  def accepted(self, outcome, indices):
    with self.lock:
      self.steps[outcome.global_step].append(indices)

  def counts(self):
    return collections.Counter(
      np.concatenate([np.ravel(i) for s in self.steps.values() for i in s])
      .astype(int)
      .tolist()
    )


def train(replica, seen):
  for indices in replica.batches():
    outcome = replica.step(jnp.ones(4))
    if outcome.accepted:
      seen.accepted(outcome, indices)
  return replica.report_data(), replica.global_step


@pytest.mark.parametrize("inline_bytes", [0, 1 << 16])
def test_each_sample_is_in_one_step_of_an_epoch(inline_bytes):
  data = coordinator.Batches(num_samples=26, global_batch=6, seed=3, epochs=2)
  seen = Inbox(data)
  result = coordinator.run_embedded(
    lambda replica: train(replica, seen),
    3,
    optax.sgd(0.1),
    PARAMS,
    data=data,
    inline_bytes=inline_bytes,
  )
  assert [step for _, step in result] == [8, 8, 8]
  for epoch in range(2):
    steps = [seen.steps[4 * epoch + i] for i in (1, 2, 3, 4)]
    assert all(len(step) == 3 for step in steps)
    samples = np.concatenate([i for step in steps for i in step])
    assert sorted([*samples, *data.left_out(epoch)]) == list(range(26))
  for reports, _ in result:
    assert [r.committed for r in reports] == [24, 24]
    assert [r.open for r in reports] == [(), ()]


def test_resumed_run_continues_with_the_remaining_samples(tmp_path):
  """Saved by three after some steps; two continue, with other shares."""
  data = coordinator.Batches(num_samples=66, global_batch=6, seed=3)
  seen = Inbox(data)
  path = tmp_path / "saved"

  def first(replica):
    for indices in replica.batches():
      outcome = replica.step(jnp.ones(4))
      if outcome.accepted and outcome.global_step <= 5:
        seen.accepted(outcome, indices)
      if outcome.global_step >= 5:
        break
    if replica.replica == 0:
      checkpoint.save(path, replica)

  opt = optax.sgd(0.1)
  coordinator.run_embedded(first, 3, opt, PARAMS, data=data)
  result = checkpoint.restore(path, PARAMS, opt.init(PARAMS))
  assert result["global_step"] == 5
  assert result["progress"].done == 30
  rest = coordinator.run_embedded(
    lambda replica: train(replica, seen),
    2,
    opt,
    result.pop("params"),
    data=data,
    **result,
  )
  assert rest[0] == (ledger.report(data, ledger.Progress(66)), 11)
  assert seen.counts() == dict.fromkeys(range(66), 1)


def test_a_gradient_that_is_never_finite_is_reported():
  data = coordinator.Batches(num_samples=10, global_batch=1, seed=3)
  seen = Inbox(data)
  reasons = collections.Counter()

  def bad(replica):
    for indices in replica.batches():
      nan = 7 in indices
      outcome = replica.step(jnp.full(4, jnp.nan if nan else 1.0))
      reasons[outcome.reason] += 1
      if outcome.accepted:
        seen.accepted(outcome, indices)
    return replica.report_data()

  ((report,),) = coordinator.run_embedded(
    bad, 1, optax.sgd(0.1), PARAMS, data=data
  )
  assert report == ledger.EpochReport(0, 9, (), (7,), ())
  assert reasons == {"": 9, "non_finite": 3}


def test_samples_are_reported_by_a_replica_far_behind():
  """Replica 1 evaluates while replica 0 takes 300 steps."""
  data = coordinator.Batches(num_samples=1000, global_batch=1, seed=3)
  saving, ahead, done = (threading.Event() for _ in range(3))

  def quick(replica):
    for number, _ in enumerate(replica.batches()):
      replica.step(jnp.ones(4))
      # The other one may begin late, and needs steps that are left.
      if number > 2 and saving.wait(60.0 if number == 50 else 0.0):
        break
    # Each of these steps is saved in place of the one before.
    for number, _ in zip(range(300), replica.batches(), strict=False):
      if number % 100 == 0:
        replica.save_soon()
      replica.step(jnp.ones(4))
    ahead.set()
    assert done.wait(60.0)

  def slow(replica):
    replica.save_soon()
    for _ in replica.batches():
      if replica.step(jnp.ones(4)).save is not None:
        break
    # It holds the step to save and, if that is another one, that of params.
    saving.set()
    assert ahead.wait(60.0)
    try:
      saved = replica.progress_at(replica.state_to_save()[1])
      (report,) = replica.report_data()
    finally:
      done.set()
    return saved.done, report.committed, replica.global_step

  def either(replica):
    return slow(replica) if replica.replica else quick(replica)

  _, (saved, committed, step) = coordinator.run_embedded(
    either,
    2,
    optax.sgd(0.1),
    PARAMS,
    data=data,
    replicas_to_aggregate=1,
    timeout=60.0,
    transfer_timeout=20.0,
    silence_timeout=20.0,
  )
  assert 0 < saved <= committed == step < 300


def test_progress_of_an_unknown_step_is_refused():
  data = coordinator.Batches(num_samples=8, global_batch=4)

  def train(replica):
    for _ in replica.batches():
      replica.step(jnp.ones(4))
    known = replica.progress_at(replica.global_step).done
    for step in (-1, 100):
      with pytest.raises(ValueError, match=f"now 2, .* got {step}, which is"):
        replica.progress_at(step)
    return known

  assert coordinator.run_embedded(
    train, 1, optax.sgd(0.1), PARAMS, data=data
  ) == [8]


def test_abandoned_samples_are_leased_again():
  data = coordinator.Batches(num_samples=6, global_batch=2, seed=3)
  drawn = []

  def gives_up(replica):
    for number, indices in enumerate(replica.batches()):
      drawn.append(indices.tolist())
      if number == 1:
        replica.abandon()
      else:
        replica.step(jnp.ones(4))

  coordinator.run_embedded(gives_up, 1, optax.sgd(0.1), PARAMS, data=data)
  assert len(drawn) == 4
  assert drawn[1] == drawn[2]


@pytest.mark.parametrize("inline_bytes", [0, 1 << 16])
def test_interrupted_step_on_samples_continues(monkeypatch, inline_bytes):
  """Ctrl-C before the gradient is submitted: the next call submits it."""
  data = coordinator.Batches(num_samples=6, global_batch=2, seed=3)
  write, calls = means.write, itertools.count()

  def interrupted(*args, **keywords):
    if next(calls) == 1:
      raise KeyboardInterrupt
    return write(*args, **keywords)

  monkeypatch.setattr(means, "write", interrupted)

  def train(replica):
    for number, _ in enumerate(replica.batches()):
      assert number < 4
      with contextlib.suppress(KeyboardInterrupt):
        replica.step(jnp.ones(4))
    return replica.stats()["gradients"]

  assert coordinator.run_embedded(
    train, 1, optax.sgd(0.1), PARAMS, data=data, inline_bytes=inline_bytes
  ) == [{"applied": 3}]


def test_invalid_data_options_are_refused():
  data = coordinator.Batches(num_samples=6, global_batch=2)

  def run(fn, n=1, **arguments):
    coordinator.run_embedded(fn, n, optax.sgd(0.1), PARAMS, **arguments)

  with pytest.raises(ValueError, match=r"batches\(\) needs data=Batches"):
    run(lambda replica: next(replica.batches()))
  with pytest.raises(ValueError, match=r"step\(\) needs the samples"):
    run(lambda replica: replica.step(jnp.ones(4)), data=data)
  with pytest.raises(ValueError, match="a multiple of the 3 gradients"):
    run(lambda replica: None, n=3, data=data)
  thirds = coordinator.Batches(num_samples=12, global_batch=6)
  with pytest.raises(ValueError, match=r"at most the number of replicas \(2\)"):
    run(lambda replica: None, n=2, data=thirds, replicas_to_aggregate=3)
  slots = coordinator.Batches(24, 12, micro_batch=2, deterministic=True)
  for refused, arguments in (
    ("replicas_to_aggregate follows from", {"replicas_to_aggregate": 1}),
    ("max_staleness=1: what is stale", {"max_staleness": 1}),
    ("all micro-batches of a step count", {"staleness_weight": "inverse"}),
    (
      "can't be combined with strategy=",
      {"strategy": coordinator.elastic_average(moving_rate=0.5)},
    ),
    ("needs the progress of its checkpoint", {"global_step": 2}),
    ("step 0 begins at position 0", {"progress": ledger.Progress(12)}),
  ):
    with pytest.raises(ValueError, match=refused):
      run(lambda replica: None, data=slots, **arguments)


def test_replay_reads_samples_from_the_journal(tmp_path):
  """The samples are in it, also of sums; the parameters come out the same."""
  journal = tmp_path / "journal.jsonl"
  data = coordinator.Batches(50, 12, seed=2)
  points = np.random.default_rng(0).normal(size=(50, 4)).astype(np.float32)
  gradient = jax.jit(lambda w, x: jnp.mean(x, 0) * jnp.tanh(w))
  opt, start = optax.sgd(0.1, momentum=0.9), jnp.ones(4)

  def fit(replica):
    for indices in replica.batches():
      replica.step(gradient(replica.params, points[indices]))

  coordinator.run_embedded(
    fit, 2, opt, start, data=data, journal=journal, fingerprint_every=1
  )
  records = journals.read(journal).records
  outcome = replay_run(
    records,
    optimizer=opt,
    params=start,
    gradient=lambda w, indices: gradient(w, points[indices]),
  )
  assert str(outcome).startswith("identical in 4 of 4 steps")
