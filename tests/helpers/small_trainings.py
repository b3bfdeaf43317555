"""A training of a line by replicas, with the gradients known to NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import strategy_programs

from optax_dist.cli.train import digits

REPLICAS = 4
START = np.array([1.0, -2.0, 0.5])


def loss(params, batch):
  """Half the mean square error."""
  return 0.5 * jnp.mean((batch.images @ params - batch.labels) ** 2)


def gradients(params, batch):
  """Each replica's gradient at its parameters, float64 `[replicas, 3]`."""
  found = []
  for i in range(REPLICAS):
    own = slice(2 * i, 2 * i + 2)
    images = batch.images[own].astype(np.float64)
    found.append((images @ params[i] - batch.labels[own]) @ images / 2)
  return np.array(found)


def batches(steps):
  """Batches of two for each replica, the same in each call."""
  rng = np.random.default_rng(0)
  for _ in range(steps):
    images = rng.normal(size=(2 * REPLICAS, 3)).astype(np.float32)
    labels = rng.normal(size=2 * REPLICAS).astype(np.float32)
    yield digits.Batch(images, labels)


def train(name, flags, steps, optimizer=None):
  """Trains with a strategy's flags, as the command would.

  Args:
    name: of the strategy.
    flags: of it, as on the command line.
    steps: number of steps.
    optimizer: another one than gradient descent with rate 0.1.

  Returns:
    The parameters to evaluate, and those of each replica.
  """
  program, sharding = strategy_programs.build(
    name,
    strategy_programs.parse(name, *flags),
    replicas=REPLICAS,
    loss_fn=loss,
    steps=steps,
    optimizer=optimizer,
  )
  state = program.init(jnp.asarray(START, jnp.float32))
  for batch in batches(steps):
    state, _ = program.step(state, jax.device_put(batch, sharding))
  return program.eval_params(state), program.replica_params(state)
