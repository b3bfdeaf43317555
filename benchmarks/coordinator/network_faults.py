"""Measures replicas on separate hosts while the network between them is bad.

Each replica and the coordinator is on a host (a network namespace, made and removed
here; that needs root). In one run for each number of replicas the network is
slow, lossy, cut and healed, one after another; at the end it is checked that no
gradient was lost or counted twice and that all held the same after each step.
Ends with exit code 1 if not, or if anything hangs or stands still for too long.

python benchmarks/coordinator/network_faults.py [--replicas 2 4] [--seconds 3 20]
"""

from __future__ import annotations

import argparse
import pathlib
import sys
import tempfile
import time

_ROOT = pathlib.Path(__file__).parents[2]
_HELPERS = _ROOT / "tests" / "helpers"
sys.path[:0] = [
  str(_ROOT),
  *(str(_HELPERS / name) for name in ("networks", "processes")),
]

import hosts as host_maker  # noqa: E402

from tests.runs import between_hosts  # noqa: E402

SHAPES = {
  "nothing": {},
  "1 ms": {"delay": 0.001},
  "10 ms": {"delay": 0.010},
  "50 ms": {"delay": 0.050},
  "100 Mbit/s": {"rate": 100e6},
  "loss 1 %": {"loss": 0.01},
  "loss 1 %, 1 ms": {"loss": 0.01, "delay": 0.001},
}


def shaped(run: between_hosts.Run, seconds: float) -> list[str]:
  """Prints how fast steps are while the network is slow or loses packets.

  Returns:
    What stood still for longer than a slow network accounts for.
  """
  bad = []
  for name, shape in SHAPES.items():
    run.hosts.shape(**shape)
    run.rate(1.0)  # Requests in flight have ended.
    began = time.monotonic()
    rate = run.rate(seconds)
    stall = run.longest_stall(began, time.monotonic())
    print(
      f"  {name:16} {1e3 / rate if rate else float('inf'):7.0f} ms a step,"
      f" the longest {stall:.2f} s",
      flush=True,
    )
    if stall > between_hosts.TRANSFER_TIMEOUT:
      bad.append(f"{name}: no step for {stall:.1f} s")
  run.hosts.shape()
  return bad


def main() -> int:
  """The exit status: 1 if anything is not as it must be."""
  parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
  add = parser.add_argument
  add("--replicas", type=int, nargs="+", default=[2, 4])
  add("--seconds", type=float, nargs="*", default=[3.0, 20.0], help="of a cut")
  add("--shaped", type=float, default=3.0, help="seconds of each; 0 for none")
  add("--delay", type=float, default=0.0, help="seconds of all packets, always")
  add("--width", type=int, default=20_000, help="parameters")
  args = parser.parse_args()
  why = host_maker.not_permitted()
  if why:
    raise SystemExit(f"No hosts can be made here: {why}.")
  bad = []
  for count in args.replicas:
    with (
      tempfile.TemporaryDirectory() as folder,
      between_hosts.Run(
        pathlib.Path(folder),
        count,
        width=args.width,
        delay=args.delay,
        # Who waits for the coordinator waits for the whole cut.
        timeout=2 * max([between_hosts.TIMEOUT / 2, *args.seconds]),
      ) as run,
    ):
      print(
        f"{count} replicas and the coordinator on {count + 1} hosts", flush=True
      )
      if args.shaped:
        bad += shaped(run, args.shaped)
      for seconds in args.seconds:
        for target in between_hosts.TARGETS:
          for both in (True, False):
            outcome = run.cut(target, seconds, both=both)
            late = between_hosts.too_late(target, seconds, outcome)
            bad += late
            print(
              f"  {target:12} cut {'both ways' if both else 'one way':9} for"
              f" {seconds:2g} s: stood still {outcome.stall:5.2f} s, all back"
              f" {outcome.back:4.2f} s after it healed {' '.join(late)}",
              flush=True,
            )
      stall = run.vanish()
      print(
        f"  a host vanishes: the others stood still {stall:.2f} s", flush=True
      )
      steps, problems = run.finish()
      bad += problems
      print(f"  {steps} steps; {problems or 'nothing is lost, all are equal'}")
  return 1 if bad else 0


if __name__ == "__main__":
  raise SystemExit(main())
