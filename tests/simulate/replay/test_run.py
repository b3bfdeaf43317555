"""A run of the coordinator, with kills, is found again to the last bit."""

import random
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from optax_dist import coordinator
from optax_dist.coordinator import journal
from optax_dist.simulate.replay.run import replay_run

N = 5
START = {
  "w": np.linspace(-1, 1, 192, dtype=np.float32),
  "b": np.full(64, 0.5, np.float32),
}
OPTIMIZER = optax.sgd(0.05, momentum=0.9)


@jax.jit
def gradient(params, batch):
  key = jax.random.key(batch, impl="rbg")
  noise = jax.random.normal(key, params["w"].shape)
  return jax.grad(
    lambda p: jnp.mean(jnp.sin(p["w"] * jnp.mean(p["b"])) ** 2 + noise * p["w"])
  )(params)


def _train(number, steps=25):
  # Or some could be done before others are in.
  everyone = threading.Barrier(N, timeout=60)

  def train(replica):
    everyone.wait()
    rng = random.Random(number + hash(replica.replica))
    batch = 1000 * replica.replica
    while replica.global_step < steps and not replica.finished:
      based_on = replica.params
      time.sleep(rng.expovariate(1 / 0.003))
      batch += 1
      replica.step(gradient(based_on, batch), batch=batch)
      if rng.random() < 0.02 and replica.replica:
        return  # It goes before the others do.
    if not replica.finished:
      replica.finish()

  return train


def _replay(records, params=START):
  return replay_run(
    records, optimizer=OPTIMIZER, params=params, gradient=gradient
  )


@pytest.mark.parametrize(
  ("k", "options"),
  [
    (3, {}),
    (2, {"max_staleness": 2, "staleness_weight": "inverse"}),
    (3, {"wire": "bfloat16"}),
    (3, {"wire": "int8"}),
    (3, {"wire": "int4", "error_feedback": 0.5}),
    (8, {}),
  ],
)
def test_a_run_of_threads_is_found_again(tmp_path, k, options):
  path = tmp_path / "run.jsonl"
  coordinator.run_embedded(
    _train(k),
    N,
    OPTIMIZER,
    START,
    replicas_to_aggregate=k,
    journal=str(path),
    fingerprint_every=1,
    timeout=60.0,
    **options,
  )
  records = journal.read(path, strict=True).records
  outcome = _replay(records)
  assert str(outcome).startswith(f"identical, {outcome.steps} steps")
  assert outcome.steps >= 25
  assert outcome.compared >= 20
  # Another batch is found out.
  commits = [r for r in records if r["kind"] == "commit"]
  commits[12]["members"][0]["batches"][0] += 1
  assert _replay(records).difference.step in (13, 14, 15)


@pytest.mark.parametrize("mean_wire", ["int8", "sign", "top_k"])
@pytest.mark.parametrize("inline_bytes", [0, 1 << 20], ids=["moved", "inline"])
def test_means_of_few_bits_are_found_again(tmp_path, mean_wire, inline_bytes):
  """Whoever averages adds what it left out; slices move, and leaders change."""
  path = tmp_path / "run.jsonl"
  start = {
    "w": np.linspace(-1, 1, 9000, dtype=np.float32),
    "b": np.full(64, 0.5, np.float32),
  }
  coordinator.run_embedded(
    _train(3),
    N,
    OPTIMIZER,
    start,
    replicas_to_aggregate=3,
    journal=str(path),
    fingerprint_every=1,
    timeout=60.0,
    wire="int4",
    mean_wire=mean_wire,
    error_feedback=0.9,
    inline_bytes=inline_bytes,
  )
  records = journal.read(path, strict=True).records
  outcome = _replay(records, start)
  assert str(outcome).startswith(f"identical, {outcome.steps} steps")
  assert outcome.compared >= 20
  told = next(r for r in records if r["kind"] == "run")
  assert told["mean_wire"] == mean_wire
  assert told["inline"] == bool(inline_bytes)
  # With another decay it is another run.
  told["error_feedback"] = 0.1
  assert _replay(records, start).difference is not None
