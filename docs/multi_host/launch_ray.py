"""Launches a job on the hosts of a Ray cluster: an actor on each runs a launcher.

  python launch_ray.py --hosts 4 -- --output /shared/first --resume train_replica.py

An actor whose host is lost is started again on another one. (With the coordinator on
host 0 that one is the exception; with `--store etcd://...` there is none.) Ctrl-C or
SIGTERM here stops all launchers as they are stopped elsewhere: replicas leave within
--grace.
"""

import argparse
import os
import secrets
import signal
import subprocess
import sys

import ray
from ray.util.placement_group import placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


@ray.remote(max_restarts=3, max_task_retries=3)
class Host:
  """One host."""

  def address(self):
    return ray.util.get_node_ip_address()

  def launch(self, variables, arguments):
    """Runs a launcher, and returns its exit code."""
    self.launcher = subprocess.Popen(
      ["optax-dist", "launch", *arguments], env={**os.environ, **variables}
    )
    return self.launcher.wait()

  def stop(self):
    """Ray's own ways to end an actor would kill it at once."""
    self.launcher.terminate()


def main():
  parser = argparse.ArgumentParser()
  parser.add_argument("--hosts", type=int, default=4)
  parser.add_argument("--gpus", type=int, default=8, help="of each host")
  parser.add_argument("arguments", nargs=argparse.REMAINDER)
  args = parser.parse_args()
  ray.init()
  bundle = {"CPU": 1, "GPU": args.gpus} if args.gpus else {"CPU": 1}
  # Each bundle on a host of its own.
  group = placement_group([bundle] * args.hosts, strategy="STRICT_SPREAD")
  ray.get(group.ready())
  hosts = [
    Host.options(
      num_cpus=1,
      num_gpus=args.gpus,
      max_concurrency=2,  # `stop` comes while `launch` runs.
      scheduling_strategy=PlacementGroupSchedulingStrategy(
        placement_group=group, placement_group_bundle_index=rank
      ),
    ).remote()
    for rank in range(args.hosts)
  ]
  job = {
    "OPTAX_DIST_NODES": str(args.hosts),
    "OPTAX_DIST_ADDRESS": f"{ray.get(hosts[0].address.remote())}:29300",
    "OPTAX_DIST_SECRET": secrets.token_hex(16),
  }
  arguments = [a for a in args.arguments if a != "--"]
  signal.signal(signal.SIGTERM, signal.default_int_handler)
  runs = [
    host.launch.remote({**job, "OPTAX_DIST_NODE_RANK": str(rank)}, arguments)
    for rank, host in enumerate(hosts)
  ]
  try:
    codes = ray.get(runs)
  except KeyboardInterrupt:
    ray.get([host.stop.remote() for host in hosts])
    codes = ray.get(runs)
  return max(codes, key=abs)


if __name__ == "__main__":
  sys.exit(main())
