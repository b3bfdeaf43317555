"""Tests of strategies with per-replica parameters, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategy_programs

from optax_dist.cli.train import digits

_REPLICAS, _PERIOD, _STEPS = 4, 2, 5
_ARGS = {
  "elastic-average": {"moving_rate": None, "rho": 0.25},
  "local-sgd": {"inner_state": "local"},
  "diloco": {"outer_learning_rate": 0.7, "outer_momentum": 0.9},
}


def _loss(params, batch):
  return jnp.mean((batch.images @ params - batch.labels) ** 2)


class _Oracle:
  """Gradient descent with rate 0.1 on each replica, and what ties them."""

  def __init__(self, name, start):
    self.name = name
    self.center = start.copy()
    self.params = np.tile(start, (_REPLICAS, 1))
    self.seen = self.params.copy()
    self.trace = np.zeros_like(start)

  def step(self, number, images, labels):
    for i in range(_REPLICAS):
      own = slice(2 * i, 2 * i + 2)
      errors = images[own] @ self.params[i] - labels[own]
      gradient = images[own].T @ errors
      if self.name == "elastic-average":
        gradient = gradient + 0.25 * (self.params[i] - self.seen[i])
      self.params[i] = self.params[i] - 0.1 * gradient
    if number % _PERIOD:
      return
    if self.name == "elastic-average":
      pulls = 0.9 / _REPLICAS * (self.params - self.center)
      self.seen[:] = self.center
      self.params -= pulls
      self.center = self.center + pulls.sum(0)
      return
    change = self.center - self.params.mean(0)
    if self.name == "diloco":
      self.trace = 0.9 * self.trace + change
      change = 0.7 * (0.9 * self.trace + change)
    self.center = self.center - change
    self.params[:] = self.center


@pytest.mark.parametrize("name", sorted(_ARGS))
def test_steps_and_metrics(name):
  program, sharding = strategy_programs.build(
    name,
    {"communication_period": _PERIOD, **_ARGS[name]},
    replicas=_REPLICAS,
    loss_fn=_loss,
    steps=_STEPS,
  )
  rng = np.random.default_rng(0)
  start = np.array([1.0, -2.0, 0.5])
  oracle = _Oracle(name, start)
  state = program.init(jnp.asarray(start, jnp.float32))
  records = []
  for number in range(1, _STEPS + 1):
    images = rng.normal(size=(2 * _REPLICAS, 3))
    labels = rng.normal(size=2 * _REPLICAS)
    batch = digits.Batch(
      images=images.astype(np.float32), labels=labels.astype(np.float32)
    )
    on_mesh = jax.device_put(batch, sharding)
    state, metrics = program.step(state, on_mesh)
    oracle.step(number, images, labels)
    np.testing.assert_allclose(
      program.replica_params(state), oracle.params, rtol=1e-4, atol=1e-5
    )
    np.testing.assert_allclose(
      program.eval_params(state), oracle.center, rtol=1e-4, atol=1e-5
    )
    mean = oracle.params.mean(0)
    apart = np.mean(np.sum((oracle.params - mean) ** 2, axis=1))
    spread = np.sqrt(apart / np.sum(mean**2))
    np.testing.assert_allclose(metrics["spread"], spread, rtol=1e-3, atol=1e-5)
    assert metrics["exchanges"] == number // _PERIOD
    records.append({k: v.item() for k, v in metrics.items()})
  assert program.step._cache_size() == 1
  records[-1] |= {"test_accuracy": 0.5, "replica_test_accuracy": [0.25, 0.75]}
  lines = program.summary(records)
  assert lines[0].startswith("center 50.0%, replicas 25.0% to 75.0%; spread")
  # Two exchanges of three float32 in five steps.
  assert lines[1] == (
    "2 exchanges of 0.0 kB: 0.0 kB per replica, 40.0% of the 0.1 kB of averaging"
    " at every step"
  )
