"""Parameters do not depend on which and how many replicas compute, or are lost."""

import functools
import itertools
import threading

import embedded_runs as runs
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pairwise
import pytest

from optax_dist import coordinator, ledger
from optax_dist.coordinator import journal
from optax_dist.coordinator._internal import phases

STEPS = 8
PARAMS = {"w": jnp.linspace(-1.0, 1.0, 600), "b": jnp.zeros(7)}
SAMPLES = np.linspace(0.1, 2.0, 64, dtype=np.float32)
OPT = optax.chain(optax.clip_by_global_norm(0.5), optax.sgd(0.1, momentum=0.9))


every_pair = pairwise.every_pair(
  replicas=[2, 3, 5], wire=["float32", "bfloat16", "int8"], inline=[True, False]
)


def batches(slots=8, **options):
  return coordinator.Batches(
    4 * 4 * slots,
    4 * slots,
    seed=3,
    epochs=STEPS // 4,
    micro_batch=4,
    deterministic=True,
    **options,
  )


@jax.jit
def gradient(params, samples, key):
  """With random numbers, and some denormals."""

  def loss(params):
    noise = jax.random.normal(key, (1, 600))
    waves = jnp.sin(params["w"][None] * samples[:, None])
    near = (params["b"][None] - samples[:, None]) ** 2
    return jnp.mean(waves**2 * noise) + jnp.sum(near)

  return jax.grad(loss)(params)


def gradient_of(replica, slot):
  result = gradient(replica.params, SAMPLES[slot.indices % 64], slot.key)
  # NumPy's: XLA flushes what is denormal to zero.
  w = np.array(result["w"])
  w[:5] *= np.float32(1e-39)
  return {**result, "w": w}


def train(replica, result):
  """Trains to the end, and notes the digest after each step."""
  for slot in replica.micro_batches():
    result.outcomes.append((slot.step, slot.number))
    replica.step(gradient_of(replica, slot))
    result.prints[replica.global_step] = replica.fingerprint()
  result.prints[replica.global_step] = replica.fingerprint()


def begin(
  world, index, data, inline, wire="float32", name=None, how=train, journal=None
):
  result = runs.Result()
  one = runs.make(
    world,
    index,
    k=data.slots,
    n=5,
    quorum={"lower_on_loss": True},
    params=PARAMS,
    opt=OPT,
    name=name,
    data=data,
    wire=wire,
    inline_bytes=65536 if inline else 0,
    journal=journal,
  )
  return result, runs.start(one, how, result)


@functools.cache
def undisturbed(slots, wire):
  """The digest after each step of one replica."""
  world = runs.endpoint.World()
  result, thread = begin(world, 0, batches(slots), True, wire)
  runs.finish([thread])
  assert result.error is None
  assert result.outcomes == list(itertools.product(range(STEPS), range(slots)))
  return result.prints


def same_as_undisturbed(results, slots, wire):
  want = undisturbed(slots, wire)
  for result in results:
    for step, digest in result.prints.items():
      assert step == 0 or digest == want[step]
  assert any(STEPS in result.prints for result in results)


@every_pair
def test_any_number_of_replicas_has_the_same_bits(replicas, wire, inline):
  """With five slots each of five replicas may have one: no sum is partial."""
  slots = 5 if replicas == 5 else 8
  world, data = runs.endpoint.World(), batches(slots)
  together = threading.Barrier(replicas)

  def meets(replica, result):
    """Takes part in all steps."""
    together.wait(120.0)
    train(replica, result)

  both = [
    begin(world, i, data, inline, wire, how=meets) for i in range(replicas)
  ]
  runs.finish([thread for _, thread in both])
  results = [result for result, _ in both]
  assert [result.error for result in results] == [None] * replicas
  same_as_undisturbed(results, slots, wire)


@every_pair
def test_a_replica_lost_in_the_middle_of_a_step_changes_nothing(
  replicas, wire, inline
):
  world, data, struck = runs.endpoint.World(), batches(), threading.Event()
  # A replica that joins late on a busy machine would find the run at its end.
  together = threading.Barrier(replicas)

  def lost(replica, result):
    """It dies once it has computed a slot of step 2 that nobody else has."""
    together.wait(120.0)
    for slot in replica.micro_batches():
      grads = gradient_of(replica, slot)
      if slot.step >= 2:
        struck.set()
        raise runs.Killed
      replica.step(grads)

  def waits(replica, result):
    """So that some slots are left for the other one."""
    together.wait(120.0)
    for slot in replica.micro_batches():
      assert slot.step < 2 or struck.wait(120.0)
      replica.step(gradient_of(replica, slot))
      result.prints[replica.global_step] = replica.fingerprint()
    result.prints[replica.global_step] = replica.fingerprint()

  both = [
    begin(world, i, data, inline, wire, how=waits) for i in range(replicas - 1)
  ]
  victim, thread = begin(world, replicas - 1, data, inline, wire, how=lost)
  runs.finish([thread, *(thread for _, thread in both)])
  results = [result for result, _ in both]
  assert [result.error for result in results] == [None] * (replicas - 1)
  assert isinstance(victim.error, runs.Killed)
  same_as_undisturbed(results, 8, wire)


@pytest.mark.parametrize("phase", ["reduce_scatter", "gather", "arrived"])
def test_a_replica_lost_in_an_exchange_changes_nothing(phase):
  world, data, killed = runs.endpoint.World(), batches(), threading.Event()
  takes_part = threading.Event()

  def strike(reached, replica):
    if replica == 2 and reached in ("arrived", phase):
      takes_part.set()
    if (reached, replica) == (phase, 2) and not killed.is_set():
      killed.set()
      raise runs.Killed

  def waits(replica, result):
    """So that the other one takes part."""
    for slot in replica.micro_batches():
      if slot.step >= 1:
        assert takes_part.wait(120.0)
        # On a busy machine it would be too late in each exchange.
        killed.wait(0.05)
      replica.step(gradient_of(replica, slot))
      result.prints[replica.global_step] = replica.fingerprint()
    result.prints[replica.global_step] = replica.fingerprint()

  phases.listen(strike)
  try:
    hows = (waits, waits, train)
    both = [
      begin(world, i, data, inline=False, how=how) for i, how in enumerate(hows)
    ]
    runs.finish([thread for _, thread in both])
  finally:
    phases.listen(None)
  results = [result for result, _ in both]
  assert [result.error for result in results[:2]] == [None] * 2
  assert killed.is_set()
  same_as_undisturbed(results[:2], 8, "float32")


def test_a_gradient_that_is_not_finite_counts_as_zeros_in_any_run(tmp_path):
  """The step counts nevertheless, with all of its slots, and names this one."""

  def run(replicas):
    path = tmp_path / f"{replicas}.jsonl"

    def bad(replica):
      for slot in replica.micro_batches():
        grads = gradient_of(replica, slot)
        if (slot.step, slot.number) == (1, 3):
          grads["w"][7] = np.nan
        replica.step(grads)
      return replica.fingerprint(), replica.global_step, replica.report_data()

    result = coordinator.run_embedded(
      bad, replicas, OPT, PARAMS, data=batches(), journal=path
    )
    commits = [
      record
      for record in journal.read(path).records
      if record["kind"] == "commit"
    ]
    return set(result), [commit["skipped"] for commit in commits]

  alone, journaled = run(1)
  assert run(3) == (alone, journaled)
  assert journaled == [None, [[44, 48]], *[None] * (STEPS - 2)]
  ((digest, step, report),) = alone
  skipped = batches().indices(((44, 48),))
  assert report[0].skipped == tuple(sorted(skipped.tolist()))
  assert [epoch.open for epoch in report] == [(), ()]
  assert step == STEPS
  assert digest != undisturbed(8, "float32")[STEPS]


def test_zeros_are_those_of_a_replica_that_has_finite_gradients_too(tmp_path):
  """Many nonfinite slots at once do not make the replica untrusted."""
  path, dropped = tmp_path / "journal.jsonl", threading.Event()

  def run(replica):
    for slot in replica.micro_batches():
      if replica.replica:
        dropped.wait(60.0)
      grads = gradient_of(replica, slot)
      if replica.replica or slot.number % 2:
        grads["w"][7] = np.nan
      if replica.step(grads).reason == "non_finite":
        dropped.set()

  data = batches(16)
  coordinator.run_embedded(
    run, 2, OPT, PARAMS, data=data, journal=path, max_skipped=data.total
  )
  records = journal.read(path).records
  commits = [record for record in records if record["kind"] == "commit"]
  size = data.micro_batch
  odd = range(size, data.total, 2 * size)
  skipped = [span for commit in commits for span in commit["skipped"]]
  assert skipped == [[p, p + size] for p in odd]


def test_a_key_follows_from_seed_step_and_number():
  seen = []

  def look(replica):
    for slot in replica.micro_batches():
      seen.append(slot)
      replica.step(PARAMS)

  data = batches()
  coordinator.run_embedded(look, 1, OPT, PARAMS, data=data)
  for slot in seen:
    want = jax.random.key(data.seed)
    for number in (slot.step, slot.number):
      want = jax.random.fold_in(want, number)
    assert slot.key == want
    start = slot.step * data.global_batch + slot.number * 4
    want = data.indices(((start, start + 4),))
    np.testing.assert_array_equal(slot.indices, want)
  assert len(seen) == STEPS * data.slots


def test_micro_batches_need_deterministic_data():
  def look(replica):
    next(replica.micro_batches())

  data = ledger.Batches(8, 4)
  with pytest.raises(ValueError, match=r"data=Batches\(..., deterministic="):
    coordinator.run_embedded(look, 1, OPT, PARAMS, data=data)
