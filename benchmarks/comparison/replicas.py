r"""Measures this package's coordinator for the other benchmarks.

Replicas are processes on loopback; a gradient is the parameters times a number.

    python benchmarks/comparison/replicas.py --params 1000
    python benchmarks/comparison/replicas.py --kill replica
    python benchmarks/comparison/replicas.py --kill coordinator
    python benchmarks/comparison/replicas.py --replicas 4 --aggregate 3 \
        --steps 100 --latency constant:0.02 --slow 5

With `--seconds` steps follow each other at once. With `--steps` replicas sleep
before each gradient as long as `--latency` says, and the time of a step is that
between the commits in the journal.
"""

import argparse
import contextlib
import itertools
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import between_hosts
import processes
import stall

WARM_UP = 10
SECRET = "of these hosts alone"


def measure(args: argparse.Namespace) -> dict[str, Any]:
  """Runs the coordinator and the replicas.

  Args:
    args: those of the command line.

  Returns:
    What was measured, with what it was.

  Raises:
    processes.Failed: if a process fails or is not done in time.
  """
  from optax_dist.coordinator.server import process

  common = {
    "peer": "optax-dist",
    "params": args.params,
    "leaves": args.leaves,
    "replicas": args.replicas,
    "aggregate": args.aggregate,
    "wire": args.wire,
  }
  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    if args.between == "nothing":
      # Its log is not found by another run on these ports.
      log = f"{folder}/coordinator.log"
      server = stack.enter_context(process.start(b"", port=0, log=log))
      address, within = server.address, [[]] * args.replicas
    else:
      address, within = _hosts(args, stack)
    group = stack.enter_context(processes.group(args.timeout))
    if args.late is not None:
      _coordinator(args, within[0], address, folder, stack)
    started = [
      group.start(
        f"replica {i}",
        [
          *(*within[i], args.python, os.path.abspath(__file__), *sys.argv[1:]),
          *("--role", str(i), "--address", address),
          *("--journal", f"{folder}/journal"),
        ],
        {"JAX_PLATFORMS": "cpu", "TMPDIR": folder},
      )
      for i in range(args.replicas)
    ]
    for one in started:
      group.wait_for(one)
    group.go(*started)
    if args.kill == "coordinator":

      def kill() -> None:
        server.kill()
        port = int(address.rpartition(":")[2])
        stack.enter_context(process.start(b"", port=port, log=log))

      return common | stall.of_a_kill(group, kill, [], started, args.moment)
    if args.kill:
      victim = started.pop(args.victim)
      return common | stall.of_a_kill(
        group, stall.killing(victim), [victim], started, args.moment
      )
    said = [group.wait_for(one) for one in started]
    common["bytes_per_step"] = [
      {k: one[k] / max(1, one["counted"]) for k in ("bytes_in", "bytes_out")}
      for one in said
    ]
    common["gradients"] = [one["gradients"] for one in said]
    if args.steps:
      return common | _step_time(pathlib.Path(folder) / "journal", args)
    return common | {
      key: said[0][key]
      for key in (
        *("steps", "seconds", "steps_per_second", "seconds_per_step"),
        *("cpu_seconds_per_step", "page_faults_per_step"),
        *(("memory_joining", "memory", "peak_memory") if args.memory else ()),
      )
    }


def _hosts(
  args: argparse.Namespace, stack: contextlib.ExitStack
) -> tuple[str, list[list[str]]]:
  """Makes a host for each replica: where its coordinator is, and what runs in each."""
  hosts = between_hosts.made(args.replicas, args.between, args.rate)
  stack.enter_context(hosts)
  if args.delay:
    hosts.shape(delay=args.delay)
  within = [["ip", "netns", "exec", name] for name in hosts.names]
  return f"{hosts.address(0)}:29300", within


def _coordinator(
  args: argparse.Namespace,
  within: list[str],
  address: str,
  folder: str,
  stack: contextlib.ExitStack,
) -> None:
  """Starts the coordinator by itself, so that any replica joins first."""
  server = subprocess.Popen(
    [
      *(*within, args.python, "-m", "optax_dist", "coordinator"),
      *("--address", address, "--output", folder),
    ],
    stdout=subprocess.PIPE,
    env=os.environ | {"OPTAX_DIST_SECRET": SECRET},
  )
  stack.callback(server.wait)
  stack.callback(server.terminate)
  assert server.stdout is not None
  server.stdout.readline()


def _step_time(path: pathlib.Path, args: argparse.Namespace) -> dict[str, Any]:
  from optax_dist.coordinator import journal

  times = [
    record["time"]
    for record in journal.read(path).records
    if record["kind"] == "commit"
  ][WARM_UP - 1 :][: args.steps + 1]
  mean = (times[-1] - times[0]) / (len(times) - 1)
  gaps = [b - a for a, b in itertools.pairwise(times)]
  return {
    "steps": len(gaps),
    "seconds_per_step": mean,
    "steps_per_second": 1 / mean,
    "step_deviation": statistics.pstdev(gaps),
  }


# --- In a process ------------------------------------------------------------


def _replica(args: argparse.Namespace) -> None:
  go = processes.end_with_parent()
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax

  from optax_dist import coordinator

  if args.in_thread:
    jax.config.update("jax_cpu_enable_async_dispatch", False)
  index = int(args.role)
  memory = processes.Memory() if args.memory else None
  params = [
    jnp.ones(args.params // args.leaves, jnp.float32)
    for _ in range(args.leaves)
  ]
  gradient = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1e-3, tree))
  if index == args.late:
    time.sleep(3.0)
  with coordinator.join(
    optax.sgd(0.01),
    params,
    replicas_to_aggregate=args.aggregate,
    total_num_replicas=args.replicas,
    coordinator_address=args.address,
    replica=index,
    wire=args.wire,
    lower_on_loss=bool(args.kill),
    start_coordinator=args.between != "nothing"
    and index == 0
    and args.late is None,
    secret=SECRET if args.between != "nothing" else None,
    timeout=30.0,
    journal=args.journal if args.steps else None,
    data=coordinator.Batches(1 << 20, 64, epochs=None) if args.data else None,
  ) as replica:
    del params
    joining = memory.most() if memory else 0
    processes.say(ready=True)
    go.wait()
    if args.kill:
      _be_watched(replica, gradient)
    compute = lambda: True
    if args.latency:
      import latencies

      latency = latencies.parse(args.latency)
      rng = np.random.default_rng([args.seed, index])
      slow = args.slow if index == args.replicas - 1 else 1.0
      draws = iter(slow * latency.draw(rng, 100_000))
      compute = lambda: _sleep(replica, float(next(draws)), args)
    used = _measure(replica, gradient, compute, args, memory, first=index == 0)
    processes.say(**used, memory_joining=joining)
  processes.leave()


def _be_watched(replica, gradient) -> None:
  step = lambda: replica.step(gradient(replica.params)).accepted
  for _ in range(WARM_UP):
    step()
  stall.watch(step)


def _sleep(replica, seconds: float, args: argparse.Namespace) -> bool:
  """Pretends to compute; whether it was not in vain."""
  end = time.monotonic() + seconds
  if not args.cancel:
    time.sleep(seconds)
    return True
  while (left := end - time.monotonic()) > 0:
    time.sleep(min(args.slice or 0.001, left))
    if replica.is_stale:
      replica.abandon()
      return False
  return True


def _measure(
  replica, gradient, compute, args, memory, first: bool
) -> dict[str, float]:
  """Makes steps until the run is over, which the first replica decides."""
  samples = replica.batches() if args.data else None

  def step() -> bool:
    if samples is not None and next(samples, None) is None:
      return False
    # Whoever keeps no gradient lets it be freed before the update.
    grads = [gradient(replica.params)]
    return not compute() or not replica.step(grads.pop()).finished

  settle = 0.0 if args.steps else min(2.0, args.seconds / 4)
  until = time.monotonic() + settle
  while replica.global_step < WARM_UP or time.monotonic() < until:
    if not step():
      break
  before, start = replica.stats(), replica.global_step
  used = processes.used()
  begin = end = time.monotonic()
  after, last = before, start
  most = [memory.most()] if memory else [0]
  while not replica.finished:
    if first and (
      last >= WARM_UP + args.steps
      if args.steps
      else end >= begin + args.seconds
    ):
      break
    if step():
      after, last, end = replica.stats(), replica.global_step, time.monotonic()
      if memory:
        most.append(memory.most())
  used = {k: v - used[k] for k, v in processes.used().items()}
  if first:
    replica.finish()
  steps, seconds = last - start, max(end - begin, 1e-9)
  return {
    "counted": steps,
    "steps": steps,
    "seconds": seconds,
    "steps_per_second": steps / seconds,
    "seconds_per_step": seconds / max(1, steps),
    "bytes_in": after["bytes_in"] - before["bytes_in"],
    "bytes_out": after["bytes_out"] - before["bytes_out"],
    "gradients": after["gradients"],
    "memory": statistics.median(most),
    "peak_memory": max(most),
    **{f"{k}_per_step": v / max(1, steps) for k, v in used.items()},
  }


def _parser() -> argparse.ArgumentParser:
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--python", default=sys.executable)
  add("--params", type=int, default=1_000)
  add("--leaves", type=int, default=1, help="arrays that hold the parameters")
  add("--replicas", type=int, default=2)
  add("--aggregate", type=int, help="gradients in a step; by default all")
  add("--wire", default="float32")
  add("--seconds", type=float, default=5.0)
  add("--steps", type=int, default=0)
  add("--latency", help="as `optax-dist simulate` takes it, or outliers:MEAN")
  add("--slow", type=float, default=1.0, help="how much slower the last one is")
  add("--cancel", action="store_true", help="give up gradients that are stale")
  add("--slice", type=float, default=0.0, help="seconds between questions")
  add("--seed", type=int, default=0)
  add("--data", action="store_true", help="lease the samples of each gradient")
  add(
    "--in-thread", action="store_true", help="no thread of JAX's for programs"
  )
  add("--kill", choices=stall.WHOM, help="whom to kill, to time the stall")
  add("--victim", type=int, default=-1, help="which one; by default the last")
  add("--moment", type=float, default=0.0)
  add("--timeout", type=float, default=120.0)
  add("--between", choices=between_hosts.KINDS, default="nothing")
  add("--delay", type=float, default=0.0, help="one way, through a switch")
  add(
    "--memory",
    action="store_true",
    help="also say how much memory it takes; to look makes steps slower",
  )
  add(
    "--late", type=int, help="joins last; the coordinator is started by itself"
  )
  add("--rate", type=float, default=0.0, help="bits per second, on a bridge")
  for name in ("--role", "--address", "--journal"):
    add(name, help=argparse.SUPPRESS)
  return parser


def _main() -> None:
  args = _parser().parse_args()
  args.aggregate = args.aggregate or args.replicas
  if args.role is None:
    processes.launch(apart=False)
    processes.say(**measure(args))
  else:
    _replica(args)


if __name__ == "__main__":
  _main()
