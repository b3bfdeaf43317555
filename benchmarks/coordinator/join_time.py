"""How long a new process takes until it takes part in a run, by size and part.

  python benchmarks/coordinator/join_time.py --millions 1 100 400

A replica takes steps, on loopback. Again and again a new process starts, imports,
compiles (from JAX's compilation cache, which the first one has filled and is not
counted), joins and leaves. Prints a row of medians, in seconds, for each number of
float32 parameters: from the start of the process until `main`; until all is imported;
until the gradient is compiled; until the process is a member; until it has the
parameters; their sum; the longest time without a step of the other replica meanwhile,
beside its usual step; and the most memory of both, as multiples of the parameters'.
"""

import argparse
import contextlib
import itertools
import os
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).parents[1] / "comparison"))

import between_hosts
import goodput
import processes

_PARTS = ("Python", "imports", "compile", "join", "snapshot")


def measure(args, millions):
  """Runs the coordinator and the replicas; returns a row of the table."""
  from optax_dist.coordinator.server import process

  with contextlib.ExitStack() as stack:
    enter = stack.enter_context
    folder = enter(tempfile.TemporaryDirectory(prefix="join-time-"))
    if args.between == "nothing":
      address = enter(process.start(b"", port=0)).address
      within = [], []
    else:
      hosts = enter(between_hosts.made(2, args.between, args.rate))
      address = f"{hosts.address(0)}:29300"
      within = [["ip", "netns", "exec", name] for name in hosts.names]
    group = enter(processes.group(args.timeout))
    command = [
      *(sys.executable, os.path.abspath(__file__)),
      *("--address", address, "--folder", folder, "--between", args.between),
      *("--size", str(int(millions * 1e6)), "--pause", str(args.pause)),
    ]
    env = {
      # Large arrays go back to the system, as they do without a setting.
      "MALLOC_MMAP_THRESHOLD_": str(1 << 20),
      "JAX_PLATFORMS": "cpu",
      "TMPDIR": folder,  # The log of another run is not found.
      "JAX_COMPILATION_CACHE_DIR": f"{folder}/compiled",
      "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    stays = group.start("replica 0", [*within[0], *command, "--role", "0"], env)
    marks = []
    for i in range(args.joins + 1):
      if i == 1:
        group.wait_for(stays)
      joins = group.start(
        f"join {i}", [*within[1], *command, "--role", "1"], env
      )
      marks.append(group.wait_for(joins))
      joins.popen.wait()
      time.sleep(args.rest)
    group.go(stays)
    stayed = group.wait_for(stays)
    members = _members(pathlib.Path(folder, "journal.jsonl"))
  return _row(millions, marks[1:], members, stayed)


def _members(path):
  """When replica 1 became a member, each time."""
  from optax_dist.coordinator import journal

  records = journal.read(path).records
  began = records[0]["unix_time"]
  return [
    began + r["time"]
    for r in records
    if r["kind"] == "join" and r["replica"] == 1
  ]


def _row(millions, joins, members, stayed):
  parts, pauses, times = [], [], stayed["times"]
  for started, begun, imported, compiled, joined in (j["marks"] for j in joins):
    member = next(t for t in members if t > compiled)
    at = (started, begun, imported, compiled, member, joined)
    parts.append([b - a for a, b in itertools.pairwise(at)])
    # From the last step before to the first one after it.
    first = max((t for t in times if t < started), default=started)
    last = min((t for t in times if t > joined), default=joined)
    within = [t for t in times if first <= t <= last]
    pauses.append(max(b - a for a, b in itertools.pairwise(within)))
  medians = map(statistics.median, zip(*parts, strict=True))
  return [
    f"{millions:g} M",
    *(f"{seconds:.2f}" for seconds in medians),
    f"{statistics.median(map(sum, parts)):.2f}",
    f"{statistics.median(pauses):.2f}",
    f"{statistics.median(b - a for a, b in itertools.pairwise(times)):.2f}",
    f"{stayed['memory']:.1f}, {max(j['memory'] for j in joins):.1f}",
  ]


# --- In a process ------------------------------------------------------------


def _replica(args):
  go = processes.end_with_parent()
  import jax
  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator

  imported = time.time()
  memory = processes.Memory()
  gradient = jax.jit(lambda x: x * 1e-3)
  params = jnp.ones(args.size, jnp.float32)
  gradient(params).block_until_ready()
  compiled = time.time()
  stays = args.role == "0"
  times = []
  with coordinator.join(
    optax.sgd(0.01),
    params,
    replicas_to_aggregate=2,
    total_num_replicas=2,
    coordinator_address=args.address,
    replica=int(args.role),
    start_coordinator=stays and args.between != "nothing",
    secret=None if args.between == "nothing" else "of these hosts alone",
    lower_on_loss=True,
    lower_on_leave=True,
    journal=pathlib.Path(args.folder, "journal.jsonl"),
    timeout=120.0,
  ) as replica:
    jax.block_until_ready(replica.params)
    del params
    joined = time.time()
    if not stays and not replica.global_step:
      replica.step(gradient(replica.params))  # The run begins with both.
    while stays and not go.is_set():
      time.sleep(args.pause)
      replica.step(gradient(replica.params))
      times.append(time.time())
      if len(times) == 3:
        processes.say(ready=True)
  if stays:
    processes.say(times=times, memory=memory.most() / (4 * args.size))
  else:
    started = goodput.started()
    marks = [started, goodput.BORN, imported, compiled, joined]
    processes.say(marks=marks, memory=memory.most() / (4 * args.size))
  processes.leave()


def _main():
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  add = parser.add_argument
  add("--millions", type=float, nargs="+", default=[1.0, 100.0, 400.0])
  add("--joins", type=int, default=5)
  add("--rest", type=float, default=3.0, help="seconds between joins")
  add("--between", choices=between_hosts.KINDS, default="nothing")
  add("--rate", type=float, default=0.0, help="bits per second, on a bridge")
  add("--pause", type=float, default=0.2, help="seconds of a gradient")
  add("--timeout", type=float, default=600.0, help="seconds for each size")
  for name in ("--role", "--address", "--folder", "--size"):
    add(name, type=int if name == "--size" else str, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.role is not None:
    _replica(args)
    return
  processes.launch(apart=False)
  names = ["parameters", *_PARTS, "in all", "longest pause", "step", "memory"]
  print(f"| {' | '.join(names)} |\n|{' --- |' * len(names)}")
  for millions in args.millions:
    print(f"| {' | '.join(measure(args, millions))} |", flush=True)
  print(f"load {os.getloadavg()[0]:.1f}, {args.joins} joins each")


if __name__ == "__main__":
  _main()
