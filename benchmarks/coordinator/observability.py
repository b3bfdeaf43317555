r"""The cost of observability per step: the journal and its timings.

    python benchmarks/coordinator/observability.py
    python benchmarks/coordinator/observability.py --params 1000000

Two replicas are processes on loopback, each in two runs: one with timings and a
journal, one without. They take 100 steps in each, in turns, so that all is measured by
the same processes on the same machine; the table has the mean time of a step of each,
and its ratio to the time with nothing on. Goal: 1.03 for a gradient of 4 kB.
"""

import argparse
import contextlib
import pathlib
import statistics
import sys
import tempfile
import time

sys.path.append(str(pathlib.Path(__file__).parents[1] / "comparison"))

import processes

KINDS = ("nothing", "timings and journal")
GOAL = 1.03
_BLOCK = 100  # Steps.
_WARM_UP = 100


def main() -> int:
  """Measures, prints a table, and tells whether the goal is met."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  parser.add_argument("--params", type=int, default=1_000)
  parser.add_argument("--seconds", type=float, default=20.0)
  for name in ("--role", "--address", "--folder"):
    parser.add_argument(name, help=argparse.SUPPRESS)
  args = parser.parse_args()
  if args.role is not None:
    _replica(args)
    return 0
  processes.launch(apart=False)
  result = _measure(args)
  first = result[KINDS[0]]
  print(f"{'a step with ...':<24}{'mean':>10}{'ratio':>8}{'steps':>8}")
  ratios = {}
  for kind in KINDS:
    # Adjacent blocks, because the machine's speed changes over time.
    pairs = zip(result[kind], first, strict=False)
    ratios[kind] = statistics.median(one / other for one, other in pairs)
    mean = statistics.fmean(result[kind])
    print(
      f"{kind:<24}{1e6 * mean:>7.0f} us{ratios[kind]:>8.3f}"
      f"{_BLOCK * len(result[kind]):>8}"
    )
  return int(max(ratios.values()) > GOAL)


def _measure(args: argparse.Namespace) -> dict[str, list[float]]:
  from optax_dist.coordinator.server import process

  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    server = stack.enter_context(process.start(b"", port=0))
    group = stack.enter_context(processes.group(args.seconds + 60))
    started = group.start_replicas(2, server.address, "--folder", folder)
    for one in started:
      group.wait_for(one)
    group.go(*started)
    said = [group.wait_for(one) for one in started]
    return said[0]["found"]


def _replica(args: argparse.Namespace) -> None:
  go = processes.end_with_parent()
  import jax
  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator

  index = int(args.role)
  gradient = jax.jit(lambda x: x * 1e-3)
  journals = (None, str(pathlib.Path(args.folder, "journal")))
  with contextlib.ExitStack() as stack:
    replicas = {
      kind: stack.enter_context(
        coordinator.join(
          optax.sgd(0.01),
          jnp.ones(args.params, jnp.float32),
          total_num_replicas=2,
          coordinator_address=args.address,
          replica=index,
          start_coordinator=False,
          timeout=30.0,
          run=kind,
          journal=journal,
        )
      )
      for kind, journal in zip(KINDS, journals, strict=True)
    }
    # The timings travel with each gradient.
    replicas[KINDS[0]]._participant.stopwatch.submitted = lambda *_: None

    def step(kind: str) -> bool:
      replica = replicas[kind]
      return replica.step(gradient(replica.params)).finished

    for kind in KINDS:
      while replicas[kind].global_step < _WARM_UP:
        step(kind)
    processes.say(ready=True)
    go.wait()
    result = {kind: [] for kind in KINDS}
    until = time.monotonic() + args.seconds
    while not replicas[KINDS[0]].finished:
      for kind in KINDS:
        for _ in range(5):
          step(kind)
        begin = time.monotonic()
        for _ in range(_BLOCK):
          step(kind)
        result[kind].append((time.monotonic() - begin) / _BLOCK)
      if not index and time.monotonic() > until:
        for replica in replicas.values():
          replica.finish()
    processes.say(found=result)
  processes.leave()


if __name__ == "__main__":
  raise SystemExit(main())
