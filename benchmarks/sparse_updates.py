"""Times sparse against dense updates of an embedding table.

A table of 1,000,000 x 64 of which a step touches 1,000 rows, under jit with
parameters and state donated, so that rows are written in place. Prints for each
optimizer that is lazy the time of a step with the dense gradient, with the
sparse one, and how many times faster that is:

  python benchmarks/sparse_updates.py [--rows N] [--touched N] [NAME ...]
"""

import argparse
import statistics
import time

import jax
import jax.numpy as jnp

from optax_dist import optimizers, sparse

LAZY = {
  "gradient_descent": optimizers.gradient_descent(0.1),
  "momentum": optimizers.momentum(0.1, 0.9),
  "adagrad": optimizers.adagrad(0.1),
  "adagrad_da": optimizers.adagrad_da(0.1),
  "adadelta": optimizers.adadelta(0.1),
  "rmsprop": optimizers.rmsprop(0.1, momentum=0.9, centered=True),
  "custom_adam": optimizers.custom_adam(0.1),
  "ftrl": optimizers.ftrl(0.1, l1_regularization_strength=0.1),
  "proximal_gradient_descent": optimizers.proximal_gradient_descent(0.1, 0.1),
  "proximal_adagrad": optimizers.proximal_adagrad(0.1),
  "normalized_sgd": optimizers.normalized_sgd(0.1),
  "keras_adamax": optimizers.keras("Adamax"),
}


def measure(transformation, table, gradient, repeats, donate=True):
  """Median seconds of one step."""

  def step(carry, gradient):
    params, state = carry
    updates, state = transformation.update(gradient, state, params)
    return sparse.apply_updates(params, updates), state

  step = jax.jit(step, donate_argnums=0 if donate else ())
  carry = step((jnp.copy(table), transformation.init(table)), gradient)
  seconds = []
  for _ in range(repeats):
    jax.block_until_ready(carry)
    start = time.perf_counter()
    carry = jax.block_until_ready(step(carry, gradient))
    seconds.append(time.perf_counter() - start)
  return statistics.median(seconds)


def main():
  """Prints a line for each optimizer."""
  parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
  parser.add_argument("names", nargs="*", metavar="NAME", default=list(LAZY))
  parser.add_argument("--rows", type=int, default=1_000_000)
  parser.add_argument("--columns", type=int, default=64)
  parser.add_argument("--touched", type=int, default=1_000)
  parser.add_argument("--repeats", type=int, default=9)
  options = parser.parse_args()
  key = jax.random.key(0)
  shape = (options.rows, options.columns)
  table = jnp.ones(shape)
  values = jax.random.normal(key, (options.touched, options.columns))
  indices = jax.random.randint(
    jax.random.fold_in(key, 1), (options.touched,), 0, options.rows
  )
  slices = sparse.IndexedSlices(values, indices, shape)
  dense = slices.to_dense()
  print(
    f"{'optimizer':26}{'dense ms':>10}{'sparse ms':>11}{'times faster':>14}"
    f"{'not donated':>13}"
  )
  for name in options.names:
    transformation = LAZY[name]
    slow = measure(transformation, table, dense, options.repeats)
    fast = measure(transformation, table, slices, options.repeats)
    kept = measure(transformation, table, slices, options.repeats, False)
    print(
      f"{name:26}{1e3 * slow:10.2f}{1e3 * fast:11.3f}{slow / fast:14.1f}"
      f"{slow / kept:13.1f}",
      flush=True,
    )


if __name__ == "__main__":
  main()
