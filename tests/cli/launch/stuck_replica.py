"""A replica whose data loader blocks, unless it was started again."""

import os
import time

import numpy as np
import optax

from optax_dist import coordinator


def blocked_data_loader():
  time.sleep(600)


def main():
  first = os.environ["OPTAX_DIST_RESTARTS"] == "0"
  ones = np.ones(4, np.float32)
  with coordinator.join(optax.sgd(0.1), ones) as replica:
    while replica.global_step < 10 and not replica.finished:
      if first and replica.replica == 1 and replica.global_step == 5:
        blocked_data_loader()
      replica.step(ones)


if __name__ == "__main__":
  main()
