"""Replicas whose gradients are wrong are found, and evicted with the evidence."""

import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import coordinator

POINTS = np.random.default_rng(0).normal(size=(96, 4)).astype(np.float32)
GRADIENT = jax.jit(jax.grad(lambda w, x: jnp.mean(jnp.tanh(x @ w) ** 2)))


def run(
  replicas, wrong, journal, audit=1.0, inline_bytes=1 << 16, bad_at_first=None
):
  """Returns the final parameters; one replica flips a bit from step 2 on.

  The others are slow until its training has ended, so that it finds the run
  when it tries to join again. Before they begin, one may have had three gradients
  that were not finite; later ones are.
  """
  data = coordinator.Batches(
    96,
    16,
    seed=1,
    epochs=12,
    micro_batch=2,
    deterministic=True,
    audit=audit,
  )
  ends, refused = {}, threading.Event()
  was_bad = threading.Event()
  if bad_at_first is None:
    was_bad.set()

  def train(replica):
    is_wrong = replica.replica == wrong
    computed = 0
    try:
      for slot in replica.micro_batches():
        grads = GRADIENT(replica.params, POINTS[slot.indices])
        computed += 1
        if replica.replica != bad_at_first:
          was_bad.wait(60.0)
        elif slot.step < 2:
          grads *= np.nan
          if computed == 3:
            was_bad.set()
        if is_wrong and slot.step >= 2:
          bits = np.array(grads)
          bits.view(np.uint32)[0] ^= 1 << 12
          grads = jnp.asarray(bits)
        elif wrong is not None and slot.step > 2:
          refused.wait(0.05)
        replica.step(grads)
    finally:
      if is_wrong:
        refused.set()
    ends[replica.replica] = np.asarray(replica.params)

  error = None
  try:
    coordinator.run_embedded(
      train,
      replicas,
      optax.sgd(0.5),
      jnp.ones(4),
      data=data,
      journal=journal,
      inline_bytes=inline_bytes,
    )
  except coordinator.CoordinatorError as found:
    error = found
  lines = [json.loads(line) for line in journal.read_text().splitlines()]
  return ends, error, lines


@pytest.mark.parametrize("inline_bytes", [0, 1 << 16])
def test_a_replica_whose_gradients_are_wrong_is_evicted(tmp_path, inline_bytes):
  right, error, _ = run(1, None, tmp_path / "right.jsonl")
  assert error is None
  ends, error, lines = run(
    3, 1, tmp_path / "wrong.jsonl", inline_bytes=inline_bytes
  )
  assert "The job refuses replica 1: its gradient" in str(error)
  assert "is not what replicas" in str(error)
  (evidence,) = [line for line in lines if line["kind"] == "audit"]
  assert evidence["evicted"] == [1]
  assert evidence["step"] >= 2
  digests = evidence["digests"]
  assert len(set(digests.values())) == 2
  assert digests["0"] == digests["2"] != digests["1"]
  # Its gradients do not count: the result is that of a single replica.
  assert sorted(ends) == [0, 2]
  for end in ends.values():
    assert end.tobytes() == right[0].tobytes()


def test_neither_of_two_differing_replicas_is_evicted(tmp_path):
  _, error, lines = run(2, 1, tmp_path / "journal.jsonl")
  assert "have computed different values" in str(error)
  assert "no other replica is left to decide" in str(error)
  (evidence,) = [line for line in lines if line["kind"] == "audit"]
  assert evidence["evicted"] == []
  assert sorted(evidence["digests"]) == ["0", "1"]


def test_untrusted_replica_decides_if_no_other_is_left(tmp_path):
  ends, error, lines = run(3, 1, tmp_path / "journal.jsonl", bad_at_first=2)
  assert "The job refuses replica 1: its gradient" in str(error)
  (evidence,) = [line for line in lines if line["kind"] == "audit"]
  assert evidence["evicted"] == [1]
  digests = evidence["digests"]
  assert digests["0"] == digests["2"] != digests["1"]
  assert sorted(ends) == [0, 2]


def test_replicas_with_equal_gradients_are_not_evicted(tmp_path):
  right, *_ = run(1, None, tmp_path / "alone.jsonl", audit=0.0)
  ends, error, lines = run(3, None, tmp_path / "journal.jsonl", audit=0.5)
  assert error is None
  assert not [line for line in lines if line["kind"] == "audit"]
  for end in ends.values():
    assert end.tobytes() == right[0].tobytes()
