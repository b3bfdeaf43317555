"""A replica of a job on several hosts, which may be started wrongly."""

import os
import sys
import time

import jax.numpy as jnp
import optax

from optax_dist import coordinator


def main():
  """Trains to a step; options choose another size, or a way to fail."""
  steps, *wrong = sys.argv[1:]
  number = os.environ["OPTAX_DIST_REPLICA"]
  options = dict(text.split("=") for text in wrong)
  if "dies" in options:
    sys.exit("ImportError: no module of that name")
  if "nan" in options:
    data = coordinator.Batches(num_samples=32, global_batch=4, seed=1)
    with coordinator.join(optax.sgd(0.5), jnp.zeros(2), data=data) as replica:
      for _ in replica.batches():
        replica.step(jnp.full(2, jnp.nan))
    return
  time.sleep(float(options.get("late", "0")))
  size = int(options.get("size", "2"))
  with coordinator.join(
    optax.sgd(0.5),
    jnp.zeros(size),
    timeout=float(options.get("timeout", "120")),
  ) as replica:
    print("joined at", replica.global_step, flush=True)
    while replica.global_step < int(steps) and not replica.finished:
      outcome = replica.step(jnp.ones(size))
      print("step", outcome.global_step, "of", len(outcome.members), flush=True)
      time.sleep(0.02)
    replica.finish()
    print("ends at", replica.global_step, f"({number})", flush=True)


if __name__ == "__main__":
  main()
