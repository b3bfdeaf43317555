"""A replica of two runs, one after the other; one is killed in the second run."""

import os
import signal

import jax.numpy as jnp
import optax

from optax_dist import coordinator


def _train(run, dies=False):
  with coordinator.join(optax.sgd(0.5), jnp.zeros(2), run=run) as replica:
    while replica.global_step < 6 and not replica.finished:
      replica.step(jnp.ones(2))
      if dies and replica.global_step == 2 and replica.replica == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    replica.finish()
    print(run, replica.global_step, flush=True)


def main():
  starts_first = os.environ["OPTAX_DIST_RESTARTS"] == "0"
  if starts_first:
    _train("first")
  _train("second", dies=starts_first)


if __name__ == "__main__":
  main()
