"""The network, its loss and its evaluation."""

import jax
import numpy as np

from optax_dist.cli.train import digits, model


def test_loss_and_count_are_those_of_the_logits():
  params = model.init(seed=0)
  _, test = digits.load()
  batch = digits.take(test, np.arange(32))
  logits = np.asarray(model.Network().apply(params, batch.images), np.float64)
  assert logits.shape == (32, 10)
  log_sums = np.log(np.exp(logits).sum(axis=1))
  losses = log_sums - logits[np.arange(32), batch.labels]
  np.testing.assert_allclose(
    model.loss(params, batch), losses.mean(), rtol=1e-5
  )
  correct = (logits.argmax(axis=1) == batch.labels).sum()
  assert int(model.count_correct(params, batch)) == correct


def test_the_seed_decides_the_parameters():
  zero, again, one = model.init(0), model.init(0), model.init(1)
  same = jax.tree.map(lambda a, b: bool((a == b).all()), zero, again)
  assert all(jax.tree.leaves(same))
  other = jax.tree.map(lambda a, b: bool((a == b).all()), zero, one)
  assert not all(jax.tree.leaves(other))
