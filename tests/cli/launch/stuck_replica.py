"""A replica whose data loader blocks, unless it was started again.

With a path as argument it blocks until the run has ended, and for longer.
"""

import os
import pathlib
import sys
import time

import numpy as np
import optax

from optax_dist import coordinator


def blocked_data_loader():
  time.sleep(600)


def block_until_the_end(blocked):
  """The other one ends the run once this one is blocked."""
  ones = np.ones(4, np.float32)
  with coordinator.join(optax.sgd(0.1), ones) as replica:
    while not replica.finished:
      if replica.replica == 1:
        blocked.touch()
        blocked_data_loader()
      replica.step(ones)
      if blocked.exists():
        replica.finish()


def main():
  first = os.environ["OPTAX_DIST_RESTARTS"] == "0"
  ones = np.ones(4, np.float32)
  with coordinator.join(optax.sgd(0.1), ones) as replica:
    while replica.global_step < 10 and not replica.finished:
      if first and replica.replica == 1 and replica.global_step == 5:
        blocked_data_loader()
      replica.step(ones)


if __name__ == "__main__":
  if sys.argv[1:]:
    block_until_the_end(pathlib.Path(sys.argv[1]))
  else:
    main()
