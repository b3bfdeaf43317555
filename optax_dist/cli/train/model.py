"""The model: a small convolutional network for 8x8 images."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn

from optax_dist.cli.train import digits


class Network(nn.Module):
  """Two convolutions, each followed by a 2x downsampling, and two dense layers.

  From float32 ``[size, 8, 8, 1]`` to logits ``[size, 10]``. About 53,000
  parameters.
  """

  @nn.compact
  def __call__(self, images: jax.Array) -> jax.Array:
    x = images
    for features in (32, 64):
      x = nn.gelu(nn.Conv(features, kernel_size=(3, 3))(x))
      x = nn.max_pool(x, window_shape=(2, 2), strides=(2, 2))
    x = x.reshape((x.shape[0], -1))
    x = nn.gelu(nn.Dense(128)(x))
    return nn.Dense(10)(x)


def init(seed: int) -> optax.Params:
  """Initializes the network's parameters."""
  images = np.zeros((1, 8, 8, 1), np.float32)
  # XLA takes four times as long to compile the default generator for a CPU.
  key = jax.random.key(seed, impl="rbg")
  return jax.jit(Network().init)(key, images)


def loss(params: optax.Params, batch: digits.Batch) -> jax.Array:
  """The mean cross-entropy over a batch, in nats."""
  logits = _logits(params, batch.images)
  losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
  return losses.mean()


def count_correct(params: optax.Params, batch: digits.Batch) -> jax.Array:
  """How many images of a batch the network classifies correctly."""
  logits = _logits(params, batch.images)
  return jnp.sum(jnp.argmax(logits, axis=-1) == batch.labels)


def _logits(params: optax.Params, images: Any) -> jax.Array:
  logits: Any = Network().apply(params, images)
  return logits
