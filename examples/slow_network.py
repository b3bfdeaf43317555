"""Runs each replica of a program on its own host, with a slow network between them.

    python examples/slow_network.py --replicas 2 --megabits 100 --delay 0.05 train.py

The hosts are network namespaces on this machine, so it needs Linux, root, and a clone
of the repository, whose tests have the program that carries their packets. The program
calls `coordinator.join` without an address, as with `optax-dist launch`.
"""

import argparse
import os
import pathlib
import secrets
import signal
import sys
import tempfile

sys.path.append(
  str(pathlib.Path(__file__).parents[1] / "tests" / "helpers" / "networks")
)

import hosts


def main() -> int:
  """Runs the replicas; returns the exit code of one that failed, or 0."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--replicas", type=int, default=2)
  add("--megabits", type=float, default=100.0, help="per second, out of a host")
  add("--delay", type=float, default=0.0, help="seconds, one way")
  add("--loss", type=float, default=0.0, help="the share of lost packets")
  add("program", nargs=argparse.REMAINDER, help="a script and its arguments")
  args = parser.parse_args()
  if not args.program:
    parser.error("a program is missing")
  if why := hosts.not_permitted():
    parser.error(f"no hosts can be made here: {why}")
  # The hosts have to be removed in this case, too.
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
  with (
    tempfile.TemporaryDirectory() as folder,
    hosts.Hosts(args.replicas) as network,
  ):
    network.shape(delay=args.delay, rate=1e6 * args.megabits, loss=args.loss)
    environment = os.environ | {
      "OPTAX_DIST_COORDINATOR_ADDRESS": f"{network.address(0)}:29300",
      "OPTAX_DIST_NUM_REPLICAS": str(args.replicas),
      "OPTAX_DIST_SECRET": secrets.token_hex(),
      "TMPDIR": folder,  # For the coordinator's log, which replica 0 starts.
    }
    started = [
      network.python(
        i, *args.program, env=environment | {"OPTAX_DIST_REPLICA": str(i)}
      )
      for i in range(args.replicas)
    ]
    codes = [process.wait() for process in started]
  return next((code for code in codes if code), 0)


if __name__ == "__main__":
  sys.exit(main())
