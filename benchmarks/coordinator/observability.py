r"""The cost of observability per step: the journal and its timings.

    python benchmarks/coordinator/observability.py
    python benchmarks/coordinator/observability.py --params 1000000

Two replicas are processes on loopback. Within one run it is switched on and off every
quarter of a second, so that all is measured by the same processes on the same
machine; the table has the mean time of a step of each, and its ratio to the time with
nothing on. Goal: 1.03 for a gradient of 4 kB.
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

import processes

KINDS = ("nothing", "timings and journal")
GOAL = 1.03
_BLOCK = 0.25  # Seconds.
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
  found = _measure(args)
  first = found[KINDS[0]]
  print(f"{'a step with ...':<24}{'mean':>10}{'ratio':>8}{'steps':>8}")
  ratios = {}
  for kind in KINDS:
    # Adjacent blocks, because the machine's speed changes over time.
    pairs = zip(found[kind], first, strict=False)
    ratios[kind] = statistics.median(one / other for one, other in pairs)
    mean = statistics.fmean(found[kind])
    print(
      f"{kind:<24}{1e6 * mean:>7.0f} us{ratios[kind]:>8.3f}"
      f"{round(_BLOCK * sum(1 / x for x in found[kind])):>8}"
    )
  return int(max(ratios.values()) > GOAL)


def _measure(args: argparse.Namespace) -> dict[str, list[float]]:
  from optax_dist.coordinator.store import process as store_process

  with contextlib.ExitStack() as stack:
    folder = stack.enter_context(tempfile.TemporaryDirectory())
    store = stack.enter_context(
      store_process.start(b"", bind=processes.HOST, port=0)
    )
    group = stack.enter_context(processes.group(args.seconds + 60))
    started = [
      group.start(
        f"replica {i}",
        [
          *(sys.executable, os.path.abspath(__file__), *sys.argv[1:]),
          *("--role", str(i), "--folder", folder),
          *("--address", store.address.partition(",")[0]),
        ],
        {"JAX_PLATFORMS": "cpu"},
      )
      for i in range(2)
    ]
    for one in started:
      group.wait_for(one)
    group.go(*started)
    said = [group.wait_for(one) for one in started]
    return said[0]["found"]


def _replica(args: argparse.Namespace) -> None:
  told = processes.end_with_parent()
  import jax
  import jax.numpy as jnp
  import optax

  from optax_dist import coordinator

  index = int(args.role)
  gradient = jax.jit(lambda x: x * 1e-3)
  with coordinator.join(
    optax.sgd(0.01),
    jnp.ones(args.params, jnp.float32),
    total_num_replicas=2,
    coordinator_address=args.address,
    replica=index,
    start_store=False,
    timeout=30.0,
  ) as replica:
    switch = _Switch(replica, pathlib.Path(args.folder, f"{index}"))
    processes.say(ready=True)
    told.wait()
    step = lambda: replica.step(gradient(replica.params)).finished
    while replica.global_step < _WARM_UP:
      step()
    found = {kind: [] for kind in KINDS}
    until = time.time() + args.seconds
    # All processes switch by the same clock.
    for block in itertools.count(int(time.time() / _BLOCK) + 1):
      end = block * _BLOCK
      while time.time() < end:  # The rest of a block that is not measured.
        if step():
          break
      kind = KINDS[block % len(KINDS)]
      switch(kind)
      for _ in range(5):
        step()
      steps, begin = replica.global_step, time.monotonic()
      while time.time() < end + 0.9 * _BLOCK and not step():
        pass
      seconds = time.monotonic() - begin
      steps = replica.global_step - steps
      if replica.finished:
        break
      if steps:
        found[kind].append(seconds / steps)
      if not index and time.time() > until:
        replica.finish()
        break
    processes.say(found=found)
  processes.leave()


class _Switch:
  """Changes what is observed of a running job, using its internals."""

  def __init__(self, replica, path: pathlib.Path):
    from optax_dist.coordinator.protocol import notes
    from optax_dist.coordinator.runtime import journal_lines

    self._replica, self._driver = replica, replica._participant.driver
    self._submitted = replica._participant.stopwatch.submitted
    describe = replica._participant.about
    nothing, journal = KINDS
    self._lines = {
      nothing: journal_lines.JournalLines(None, describe),
      journal: journal_lines.JournalLines(path, describe),
    }
    for one in self._lines.values():
      one.open([])
      one.write(notes.Run(notes.VERSION, "", 0))

  def __call__(self, kind: str) -> None:
    self._replica._participant.stopwatch.submitted = (
      (lambda *_: None) if kind == KINDS[0] else self._submitted
    )
    self._driver.post(
      lambda: setattr(self._driver, "_journal", self._lines[kind])
    )


if __name__ == "__main__":
  raise SystemExit(main())
