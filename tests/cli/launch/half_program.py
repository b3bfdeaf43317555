"""Replicas on two hosts each, of which one never has all of its processes."""

import os
import sys
import time

import jax.numpy as jnp
import optax

from optax_dist import coordinator


def main():
  """Replica 0 trains in its first process; replica 1 waits for its second."""
  replica = os.environ["OPTAX_DIST_REPLICA"]
  process = os.environ["OPTAX_DIST_PROCESS_INDEX"]
  print("process", replica, process, flush=True)
  if replica == "1" and process == "0":
    coordinator.initialize_processes()
  if (replica, process) != ("0", "0"):
    time.sleep(600)
  # What becomes of launchers is the same if replica 0 has no program of JAX.
  del os.environ["OPTAX_DIST_NUM_PROCESSES"]
  del os.environ["OPTAX_DIST_PROCESS_INDEX"]
  with coordinator.join(optax.sgd(0.5), jnp.zeros(2)) as trained:
    while not os.path.exists(sys.argv[1]):
      outcome = trained.step(jnp.ones(2))
      print("step", outcome.global_step, flush=True)
      time.sleep(0.02)
    trained.finish()
  print("ends well", flush=True)


if __name__ == "__main__":
  main()
