"""The cross-shard strategy's step against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import strategy_programs

from optax_dist.cli.train import digits

_REPLICAS, _PER_REPLICA, _STEPS = 8, 2, 3


def _loss(params, batch):
  errors = batch.images @ params - batch.labels
  return jnp.mean(errors**2)


def _numpy_step(params, batch, reduction):
  losses, gradients = [], []
  images = batch.images.astype(np.float64)
  for start in range(0, _REPLICAS * _PER_REPLICA, _PER_REPLICA):
    own = slice(start, start + _PER_REPLICA)
    errors = images[own] @ params - batch.labels[own]
    losses.append(np.mean(errors**2))
    gradient = 2 * errors @ images[own] / _PER_REPLICA
    norm = np.linalg.norm(gradient)
    gradients.append(gradient / max(norm, 1.0))
  update = getattr(np, reduction)(gradients, axis=0)
  return params - 0.1 * update, np.mean(losses)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_step_is_clip_then_reduce_then_apply(reduction):
  program, sharding = strategy_programs.build(
    "cross-shard",
    {"reduction": reduction},
    replicas=_REPLICAS,
    loss_fn=_loss,
    steps=_STEPS,
  )
  rng = np.random.default_rng(0)
  expected = np.array([1.0, -2.0, 0.5])
  state = program.init(jnp.asarray(expected, jnp.float32))
  for _ in range(_STEPS):
    # Some replicas' gradients are short enough not to be clipped.
    size = _REPLICAS * _PER_REPLICA
    scale = np.repeat(np.linspace(0.05, 1, _REPLICAS), _PER_REPLICA)
    batch = digits.Batch(
      images=(rng.normal(size=(size, 3)) * scale[:, None]).astype(np.float32),
      labels=rng.normal(size=size).astype(np.float32),
    )
    on_mesh = jax.device_put(batch, sharding)
    state, metrics = program.step(state, on_mesh)
    expected, loss = _numpy_step(expected, batch, reduction)
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(
      program.eval_params(state), expected, rtol=1e-4, atol=1e-5
    )
  assert program.step._cache_size() == 1
