"""How long a replica takes to join a run that goes on, by the size of its parameters.

  python benchmarks/coordinator/join_time.py --millions 1 100

Two replicas are processes on loopback and take steps; a third one joins, with its
programs compiled, and leaves again. Prints a line of JSON for each size: the medians of
the seconds that `coordinator.join` took, and of the longest time without a step of the
others meanwhile.
"""

import argparse
import itertools
import os
import pathlib
import statistics
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[1] / "comparison"))

import processes


def measure(args, millions):
  """Runs the coordinator and three replicas; returns what was measured."""
  from optax_dist.coordinator.server import process

  with (
    process.start(b"", port=0) as server,
    processes.group(args.timeout) as group,
  ):
    command = [sys.executable, os.path.abspath(__file__), *sys.argv[1:]]
    started = [
      group.start(
        f"replica {i}",
        [
          *command,
          *("--role", str(i), "--address", server.address),
          *("--size", str(int(millions * 1e6))),
        ],
        {"JAX_PLATFORMS": "cpu"},
      )
      for i in range(3)
    ]
    spans = group.wait_for(started[2])["spans"]
    group.go(*started[:2])
    times = group.wait_for(started[0])["times"]
  pauses = []
  for begin, end in spans:
    # From the last step before to the first one after it.
    first = max((t for t in times if t < begin), default=begin)
    last = min((t for t in times if t > end), default=end)
    within = [t for t in times if first <= t <= last]
    pauses.append(max(b - a for a, b in itertools.pairwise(within)))
  return {
    "millions": millions,
    "join_seconds": statistics.median(end - begin for begin, end in spans),
    "pause_seconds": statistics.median(pauses),
    "step_seconds": statistics.median(
      b - a for a, b in itertools.pairwise(times)
    ),
    "joins": len(spans),
    "load": os.getloadavg()[0],
  }


# --- In a process ------------------------------------------------------------


def _replica(args):
  told = processes.end_with_parent()
  import jax
  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator

  index = int(args.role)
  gradient = jax.jit(lambda x: x * 1e-3)
  params = jnp.ones(args.size, jnp.float32)
  gradient(params).block_until_ready()

  def join():
    return coordinator.join(
      optax.sgd(0.01),
      params,
      replicas_to_aggregate=2,
      total_num_replicas=3,
      coordinator_address=args.address,
      replica=index,
      start_coordinator=False,
      lower_on_loss=True,
      timeout=120.0,
    )

  if index == 2:
    spans = []
    for _ in range(args.joins + 1):
      time.sleep(args.between)
      begin = time.monotonic()
      with join() as replica:
        jax.block_until_ready(replica.params)
        spans.append((begin, time.monotonic()))
        replica.step(gradient(replica.params))
    processes.say(spans=spans[1:])  # The first one compiles.
  else:
    times = []
    with join() as replica:
      while not told.is_set():
        replica.step(gradient(replica.params))
        times.append(time.monotonic())
    processes.say(times=times)
  processes.leave()


def _main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--millions", type=float, nargs="+", default=[1.0, 100.0])
  add("--joins", type=int, default=5)
  add("--between", type=float, default=3.0, help="seconds between joins")
  add("--timeout", type=float, default=400.0)
  for name in ("--role", "--address", "--size"):
    add(name, type=int if name == "--size" else str, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.role is None:
    processes.launch(apart=False)
    for millions in args.millions:
      processes.say(**measure(args, millions))
  else:
    _replica(args)


if __name__ == "__main__":
  _main()
