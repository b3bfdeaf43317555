"""Measures `coordinator.as_optimizer` against `Replica.step` called by hand.

    python benchmarks/as_optimizer.py
    python benchmarks/as_optimizer.py --millions 10 --rounds 10

Two replicas as processes on this host, both needed for a step; float32 parameters
in four arrays, Adam, and a gradient that costs next to nothing. A round takes steps
in each of three ways, in the same processes: a loop around `Replica.step`; a train
step with the update under jit; one with only the gradient under jit. Prints the
median over the rounds of the time of each, and its ratio to the loop's in the same
round.
"""

import argparse
import multiprocessing
import os
import secrets
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax

from optax_dist import coordinator
from optax_dist.coordinator.server import process


def loss(params, x):
  return sum(jnp.sum((w - x) ** 2) for w in jax.tree.leaves(params))


def ways(size, options):
  """A function for each way that takes one step."""
  adam = optax.adam(1e-3)
  params = {name: jnp.zeros(size // 4) for name in "abcd"}
  gradient = jax.jit(jax.grad(loss))
  replica = coordinator.join(adam, params, run="by hand", **options)

  def by_hand(x):
    replica.step(gradient(replica.params, x))

  def trainer(name, jit):
    tx = coordinator.as_optimizer(
      adam, total_steps=10**9, run=name, **options
    ).tx
    state = [params, tx.init(params)]

    def update(grads, params, opt_state):
      updates, opt_state = tx.update(grads, opt_state, params)
      return optax.apply_updates(params, updates), opt_state

    def whole(params, opt_state, x):
      return update(jax.grad(loss)(params, x), params, opt_state)

    def parts(params, opt_state, x):
      return update(gradient(params, x), params, opt_state)

    step = jax.jit(whole, donate_argnums=1) if jit else parts

    def take(x):
      state[:] = jax.block_until_ready(step(*state, x))

    return take

  return {
    "by hand": by_hand,
    "under jit": trainer("jit", True),
    "outside": trainer("outside", False),
  }


def run(index, size, rounds, steps, address, secret, results):
  result = ways(
    size,
    {
      "replica": index,
      "total_num_replicas": 2,
      "coordinator_address": address,
      "secret": secret,
      "start_coordinator": False,
    },
  )
  x = jnp.float32(index)
  times = {name: [] for name in result}
  for number in range(rounds + 1):
    for name, take in list(result.items())[:: 1 if number % 2 else -1]:
      start = time.perf_counter()
      for _ in range(steps):
        take(x)
      if number:  # The first one compiles.
        times[name].append((time.perf_counter() - start) / steps)
  results.put(times)
  results.close()
  results.join_thread()
  time.sleep(1)
  multiprocessing.current_process().kill()


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--millions", type=float, default=1.0)
  parser.add_argument("--rounds", type=int, default=20)
  parser.add_argument("--steps", type=int, default=10, help="of a round")
  args = parser.parse_args()
  # As the launcher sets them.
  os.environ["MALLOC_MMAP_THRESHOLD_"] = str(1 << 30)
  os.environ["MALLOC_TRIM_THRESHOLD_"] = str(1 << 30)
  secret = secrets.token_hex()
  server = process.start(secret.encode(), port=0)
  spawned = multiprocessing.get_context("spawn")
  results = spawned.Queue()
  size = int(args.millions * 1e6)
  rest = (size, args.rounds, args.steps, server.address, secret, results)
  made = [spawned.Process(target=run, args=(i, *rest)) for i in range(2)]
  for one in made:
    one.start()
  times = results.get()
  for one in made:
    one.kill()
  server.stop()
  base = times["by hand"]
  for name, values in times.items():
    ratio = np.median(np.divide(values, base))
    print(
      f"{name:10} {1e3 * statistics.median(values):7.2f} ms  ratio {ratio:.2f},"
      f" of the shortest {min(values) / min(base):.2f}"
    )


if __name__ == "__main__":
  main()
