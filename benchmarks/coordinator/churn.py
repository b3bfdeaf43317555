"""Descriptors and threads of one process while replicas come and go.

One replica stays; another one leaves, or raises, and joins again, over sockets:

  python benchmarks/coordinator/churn.py --steps 5000 --stay 50
"""

import argparse
import gc
import os
import threading
import time

import jax.numpy as jnp
import optax

from optax_dist import coordinator
from optax_dist.coordinator.server import process

_PARAMS = {"w": jnp.ones(1000)}


def _counts():
  gc.collect()
  return len(os.listdir("/proc/self/fd")), threading.active_count()


def main():
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--steps", type=int, default=5000)
  parser.add_argument("--stay", type=int, default=50, help="steps of a stay")
  parser.add_argument("--inline-bytes", type=int, default=0)
  args = parser.parse_args()
  secret = os.urandom(16)
  with process.start(secret, port=0) as server:
    options = {
      "coordinator_address": server.address,
      "secret": secret,
      "bind": "127.0.0.1",
      "start_coordinator": False,
      "total_num_replicas": 2,
      "replicas_to_aggregate": 1,
      "lower_on_loss": True,
      "inline_bytes": args.inline_bytes,
    }
    opt, over = optax.sgd(0.1), threading.Event()
    with coordinator.join(opt, _PARAMS, replica=0, **options) as first:

      def go_on():
        while not over.is_set():
          first.step(_PARAMS)

      other = threading.Thread(target=go_on)
      other.start()
      began, joins = time.monotonic(), 0
      while first.global_step < args.steps:
        try:
          with coordinator.join(opt, _PARAMS, replica=1, **options) as second:
            joins += 1
            for _ in range(args.stay):
              second.step(_PARAMS)
            if joins % 2:
              raise ZeroDivisionError
        except ZeroDivisionError:
          pass
        if joins % 10 == 1:
          files, threads = _counts()
          print(
            f"step {first.global_step:,}: {joins} joins, {files} descriptors,"
            f" {threads} threads",
            flush=True,
          )
      over.set()
      other.join()
    files, threads = _counts()
    print(
      f"at the end: {joins} joins, {files} descriptors, {threads} threads,"
      f" {time.monotonic() - began:.1f} s"
    )


if __name__ == "__main__":
  main()
