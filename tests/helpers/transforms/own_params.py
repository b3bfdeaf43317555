"""Replicas that train parameters of their own."""

import jax
import numpy as np
import optax


def normal(seed, *shape):
  """Normally distributed float32 numbers."""
  return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def stack(tree, size=4):
  """So many replicas that are all at this place."""
  return jax.tree.map(lambda x: np.stack([x] * size), tree)


def row(tree, i):
  """One of the replicas."""
  return jax.tree.map(lambda x: x[i], tree)


def take_step(tx, state, params, gradients):
  """A step of one replica; a parameter without a gradient stays as it is."""
  updates, state = tx.update(gradients, state, params)
  updates = jax.tree.map(
    lambda x, update: 0 * x if update is None else update, params, updates
  )
  return optax.apply_updates(params, updates), state
