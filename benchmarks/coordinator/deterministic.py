"""Samples per time with deterministic data, next to k = N and to k = N - 1.

Replicas are processes on loopback that sleep instead of computing; a gradient is the
parameters times a number. A step has `--slots` micro-batches for each replica. With
k = N and k = N - 1 each replica adds up its own (and gives up when its step is over);
with deterministic data replicas that are done take over the others'. All kinds run in
the same processes, interleaved, with the same sleeps:

  python benchmarks/coordinator/deterministic.py --slow 3
  python benchmarks/coordinator/deterministic.py --lognormal 0.6 --replicas 8
  python benchmarks/coordinator/deterministic.py --slots 1   # no stragglers: the cost

Prints a line of JSON with the medians: of seconds per step, and of samples per second
as ratios to k = N in the same round.
"""

import argparse
import pathlib
import statistics
import sys
import time

sys.path.append(str(pathlib.Path(__file__).parents[1] / "comparison"))

import processes

KINDS = ("all", "all_but_one", "deterministic")
_WARM_UP = 8


def measure(args):
  """Runs coordinator and replicas; returns what was measured."""
  from optax_dist.coordinator.server import process

  with (
    process.start(b"", port=0) as server,
    processes.group(args.timeout) as group,
  ):
    started = group.start_replicas(args.replicas, server.address)
    said = [group.wait_for(process) for process in started]
  rounds = said[0]["rounds"]
  result = {k: v for k, v in vars(args).items() if k not in ("role", "address")}
  for kind in args.kinds:
    result[kind] = {
      "seconds_per_step": statistics.median(r[kind]["step"] for r in rounds),
      "samples_per_second": statistics.median(r[kind]["rate"] for r in rounds),
    }
    if "all" in args.kinds:
      ratios = [r[kind]["rate"] / r["all"]["rate"] for r in rounds]
      result[kind]["rate_to_all"] = statistics.median(ratios)
      result[kind]["rates_to_all"] = [round(ratio, 3) for ratio in ratios]
  return result


# --- In a process ------------------------------------------------------------


def _replica(args):
  processes.end_with_parent()
  import jax
  import jax.numpy as jnp
  import numpy as np
  import optax

  from optax_dist import coordinator

  index, count = int(args.role), args.replicas
  params = [jnp.ones(args.params // 4, jnp.float32) for _ in range(4)]
  gradient = jax.jit(lambda tree: jax.tree.map(lambda x: x * 1e-3, tree))
  add = jax.jit(lambda a, b: jax.tree.map(jnp.add, a, b))

  def factor(step):
    """How much slower this replica is in a step, the same in all kinds."""
    slow = args.slow if index == count - 1 else 1.0
    if not args.lognormal:
      return slow
    rng = np.random.default_rng([args.seed, index, step])
    return slow * rng.lognormal(0.0, args.lognormal)

  def compute(replica):
    time.sleep(args.seconds_per_slot * factor(replica.global_step))
    return gradient(replica.params)

  def share(replica):
    """The sum of the replica's own micro-batches; None if it is too late."""
    total = compute(replica)
    for _ in range(args.slots - 1):
      if replica.is_stale:
        return None
      total = add(total, compute(replica))
    return total

  def run(kind, number):
    k = count - 1 if kind == "all_but_one" else count
    deterministic = kind == "deterministic"
    batch = k * args.slots
    data = coordinator.Batches(
      1 << 20,
      batch,
      epochs=None,
      **({"micro_batch": 1, "deterministic": True} if deterministic else {}),
    )
    with coordinator.join(
      optax.sgd(0.01),
      params,
      replicas_to_aggregate=None if deterministic else k,
      total_num_replicas=count,
      coordinator_address=args.address,
      replica=index,
      start_coordinator=False,
      timeout=60.0,
      run=f"{kind} {number}",
      data=data,
      **({"probe": None} if deterministic else {}),
    ) as replica:
      begin = first = end = last = None
      for _ in replica.batches():
        grads = compute(replica) if deterministic else share(replica)
        outcome = replica.abandon() if grads is None else replica.step(grads)
        step, now = outcome.global_step, time.monotonic()
        if step >= _WARM_UP and begin is None:
          begin, first = now, step
        if begin is not None and step > (last or first):
          end, last = now, step
          if index == 0 and now - begin > args.seconds:
            replica.finish()
            break
    if index:
      return {}
    seconds = (end - begin) / (last - first)
    return {"step": seconds, "rate": batch / seconds}

  rounds = []
  for number in range(args.rounds):
    order = args.kinds if number % 2 else args.kinds[::-1]
    rounds.append({kind: run(kind, number) for kind in order})
  processes.say(rounds=rounds)
  processes.leave()


def _main():
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--params", type=int, default=1 << 20, help="numbers, of 4 bytes each")
  add("--replicas", type=int, default=4)
  add("--slots", type=int, default=4, help="micro-batches for each replica")
  add("--seconds-per-slot", type=float, default=0.02)
  add("--slow", type=float, default=1.0, help="how much slower the last one is")
  add("--lognormal", type=float, default=0.0, help="sigma, by replica and step")
  add("--seconds", type=float, default=5.0, help="of each run")
  add("--rounds", type=int, default=3)
  add("--kinds", nargs="+", choices=KINDS, default=KINDS)
  add("--seed", type=int, default=0)
  add("--timeout", type=float, default=280.0)
  for name in ("--role", "--address"):
    add(name, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.role is None:
    processes.launch(apart=False)
    processes.say(**measure(args))
  else:
    _replica(args)


if __name__ == "__main__":
  _main()
