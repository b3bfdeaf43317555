r"""What a small step costs a replica: calls, wake-ups and processor time.

    python benchmarks/coordinator/calls_of_a_step.py
    python benchmarks/coordinator/calls_of_a_step.py --list

Two replicas and their coordinator are processes on loopback; a step has a gradient of
1,000 float32, which is sent inline, and SGD. Of one replica, the first part counts

* processor time of a step, of the process and of each of its threads: the median over
  several runs of 2,000 steps,
* wake-ups of each thread: how often it has waited in the kernel,

and the second part, in another run of the same processes with Python's profiler on,

* Python functions that a step calls, and how often, by thread, and the files that they
  are in. `--list` prints each of them.

Counts, unlike times, are the same on a busy machine.
"""

import argparse
import collections
import contextlib
import os
import pathlib
import statistics
import sys
import threading
import time

sys.path.append(str(pathlib.Path(__file__).parents[1] / "comparison"))

import processes

GOALS = {"files": 35, "functions": 200, "processor time, ms": 0.5}
_WARM_UP = 100
_PROFILED = 200


def main() -> int:
  """Measures, prints a table, and tells whether the goals are met."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--params", type=int, default=1_000)
  parser.add_argument("--steps", type=int, default=2_000, help="of a run")
  parser.add_argument("--runs", type=int, default=5)
  parser.add_argument("--list", action="store_true", help="print each function")
  for name in ("--role", "--address"):
    parser.add_argument(name, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.role is not None:
    _replica(args)
    return 0
  processes.launch(apart=False)
  result = _measure(args)
  if args.list:
    for file, name, thread, calls in result["listed"]:
      print(f"{calls:8.2f}  {thread:<12}{file}:{name}")
  print(f"{'a step':<30}{'found':>10}{'goal':>8}")
  missed = False
  for name, number in result["numbers"].items():
    goal = GOALS.get(name)
    missed |= goal is not None and number > goal
    print(f"{name:<30}{number:>10.2f}{'' if goal is None else goal:>8}")
  return int(missed)


def _measure(args: argparse.Namespace) -> dict:
  from optax_dist.coordinator.server import process

  with (
    process.start(b"", port=0) as server,
    processes.group(600.0) as group,
  ):
    first, _ = group.start_replicas(2, server.address)
    return group.wait_for(first)


def _replica(args: argparse.Namespace) -> None:
  processes.end_with_parent()
  import jax
  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator

  is_counted = int(args.role) == 0
  gradient = jax.jit(lambda x: x * 1e-3)

  def join(name: str) -> coordinator.Replica:
    return coordinator.join(
      optax.sgd(0.01),
      jnp.ones(args.params, jnp.float32),
      total_num_replicas=2,
      coordinator_address=args.address,
      replica=int(args.role),
      start_coordinator=False,
      timeout=60.0,
      run=name,
    )

  def take(replica: coordinator.Replica, steps: int) -> None:
    for _ in range(steps):
      replica.step(gradient(replica.params))

  numbers = {}
  with join("processor time") as replica:
    take(replica, _WARM_UP)
    runs = []
    for _ in range(args.runs):
      before = _used()
      take(replica, args.steps)
      after = _used()
      runs.append({k: v - before.get(k, 0) for k, v in after.items()})
  for name in runs[0]:
    mid = statistics.median(run.get(name, 0) / args.steps for run in runs)
    if mid >= 0.005:
      numbers[name] = mid
  calls = collections.Counter()
  threading.setprofile(_profiler(calls))
  with join("calls") as replica:
    threading.setprofile(None)
    take(replica, _WARM_UP)
    sys.setprofile(_profiler(calls))
    calls.clear()
    take(replica, _PROFILED)
    # A copy: the other threads go on.
    counted = {key: n / _PROFILED for key, n in calls.copy().items()}
    sys.setprofile(None)
  # What is called in less than every second step is no part of one.
  counted = {key: n for key, n in counted.items() if n > 0.5}
  if is_counted:
    own = [key for key in counted if "optax_dist" in key[0]]
    numbers["files"] = len({file for file, _, _ in counted})
    numbers["functions"] = len({key[:2] for key in counted})
    numbers["files of optax_dist"] = len({file for file, _, _ in own})
    numbers["functions of optax_dist"] = len({key[:2] for key in own})
    numbers["calls"] = sum(counted.values())
    for thread in sorted({key[2] for key in counted}):
      numbers[f"calls, {thread}"] = sum(
        n for key, n in counted.items() if key[2] == thread
      )
    listed = sorted(counted.items(), key=lambda item: (item[0][2], item[0]))
    root = str(pathlib.Path(coordinator.__file__).parents[1]) + os.sep
    processes.say(
      numbers=numbers,
      listed=[
        (file.removeprefix(root), f"{line} {name}", thread, n)
        for ((file, (line, name), thread), n) in listed
      ],
    )
  processes.leave()


def _profiler(calls: collections.Counter):
  """Counts the calls of Python functions, in the thread that it is set in."""

  def count(frame, event, arg):
    if event == "call":
      code = frame.f_code
      where = code.co_filename, (code.co_firstlineno, code.co_qualname)
      calls[(*where, _kind(threading.current_thread()))] += 1

  return count


def _kind(thread: threading.Thread) -> str:
  if thread is threading.main_thread():
    return "training"
  if not thread.name.startswith("optax-dist-"):
    return "other"
  last = thread.name.rpartition("-")[2]
  return "event loop" if last.isdigit() else last


def _used() -> dict[str, float]:
  """Processor time and wake-ups so far."""
  result = collections.Counter(
    {"processor time, ms": 1e3 * time.process_time()}
  )
  kinds = {t.native_id: _kind(t) for t in threading.enumerate()}
  for task in pathlib.Path("/proc/self/task").iterdir():
    kind = kinds.get(int(task.name), "other")
    with contextlib.suppress(OSError):  # It has ended.
      nanoseconds = int((task / "schedstat").read_text().split()[0])
      status = (task / "status").read_text().splitlines()
      (waits,) = [x for x in status if x.startswith("voluntary_ctxt")]
      result[f"processor time, {kind}, ms"] += 1e-6 * nanoseconds
      result[f"wake-ups, {kind}"] += int(waits.split()[1])
  return dict(result)


if __name__ == "__main__":
  sys.exit(main())
