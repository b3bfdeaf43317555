"""A replica of several processes, wherever they are, for tests to kill.

Prints its steps and fingerprints, until there is the file that it was told.
"""

import os
import pathlib
import sys
import time

import numpy as np
from jax.experimental import multihost_utils

from optax_dist import coordinator
from tests.runs import models


def main():
  end = pathlib.Path(sys.argv[1])
  coordinator.initialize_processes()
  opt, params, gradient = models.sharded()
  call = 0
  with coordinator.join(opt, params) as replica:
    print(f"process {os.getpid()} joins at step {replica.global_step}")
    while not replica.finished:
      # All processes of a replica must do the same at the same step.
      if multihost_utils.broadcast_one_to_all(np.int32(end.exists())):
        break
      time.sleep(0.02)
      call += 1
      number = 10 * replica.replica + call % 100
      outcome = replica.step(gradient(replica.params, number, None))
      step, of = outcome.global_step, len(outcome.members)
      print(f"step {step} of {of}, fingerprint {replica.fingerprint()}")
    replica.finish()
    print(f"ends at {replica.global_step}, {replica.fingerprint()}")


if __name__ == "__main__":
  main()
