"""Two replicas, of which the first one stops the other until the run is over."""

import os
import pathlib
import signal
import sys
import time

import numpy as np
import optax

from optax_dist import coordinator


def _wait_for(path):
  while not os.path.lexists(path):
    time.sleep(0.01)


def main():
  folder = pathlib.Path(sys.argv[1])
  named, over = folder / "pid", folder / "over"
  ones = np.ones(4, np.float32)
  with coordinator.join(
    optax.sgd(0.5),
    ones,
    # Its log has no means.
    inline_bytes=0,
    silence_timeout=1.0,
    transfer_timeout=1.0,
    timeout=60.0,
  ) as replica:
    first = replica.replica == 0
    replica.step(ones)
    if first:
      _wait_for(named)
      os.kill(int(named.readlink().name), signal.SIGSTOP)
    else:
      named.symlink_to(str(os.getpid()))
      _wait_for(over)
    while replica.global_step < 8 and not replica.finished:
      replica.step(ones)
    replica.finish()
    print(f"step {replica.global_step}", flush=True)
  if first:
    over.touch()
    os.kill(int(named.readlink().name), signal.SIGCONT)


if __name__ == "__main__":
  main()
