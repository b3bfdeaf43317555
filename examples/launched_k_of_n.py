"""Trains with k of N replicas; any of them may be killed meanwhile.

  optax-dist launch --replicas 4 --replicas-to-aggregate 3 --output runs/first \
      examples/launched_k_of_n.py --steps 300

Then `kill -9` one of the process ids that it prints. The others go on, and the
launcher starts it again. `--resume` goes on after the whole job was stopped.
"""

import argparse
import os
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist import coordinator
from optax_dist.coordinator import checkpoint


def loss(params, x, y):
  hidden = jnp.tanh(x @ params["w1"] + params["b1"])
  return jnp.mean((hidden @ params["w2"] - y) ** 2)


def batch(rng, size=64):
  """Points of the curve that the network learns."""
  x = rng.uniform(-3, 3, (size, 1)).astype(np.float32)
  return x, np.sin(2 * x)


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--steps", type=int, default=300)
  parser.add_argument("--save-every", type=int, default=100)
  parser.add_argument(
    "--pause", type=float, default=0.0, help="as if steps took that much longer"
  )
  args = parser.parse_args()

  keys = jax.random.split(jax.random.key(0))
  params = {
    "w1": jax.random.normal(keys[0], (1, 32)),
    "b1": jnp.zeros(32),
    "w2": 0.1 * jax.random.normal(keys[1], (32, 1)),
  }
  tx = optax.adam(1e-2)
  gradient = jax.jit(jax.value_and_grad(loss))

  # The launcher's --output, and what an earlier start has saved there.
  folder = pathlib.Path(os.environ.get("OPTAX_DIST_OUTPUT", "."), "checkpoints")
  state = checkpoint.resume(folder, params, tx.init(params))

  with coordinator.join(tx, **state) as replica:
    print(f"process {os.getpid()} joins at step {replica.global_step}")
    # Each replica draws its own data, and other data when it starts again.
    rng = np.random.default_rng([replica.replica, os.getpid()])
    value = float("nan")
    while replica.global_step < args.steps and not replica.finished:
      value, grads = gradient(replica.params, *batch(rng))
      time.sleep(args.pause)
      outcome = replica.step(grads)
      checkpoint.save_if_due(folder, replica, outcome, args.save_every, keep=3)
    outcome = replica.finish()
    checkpoint.save_if_due(folder, replica, outcome, args.save_every, keep=3)
    print(f"step {replica.global_step}, loss {value:.4f}")


if __name__ == "__main__":
  main()
