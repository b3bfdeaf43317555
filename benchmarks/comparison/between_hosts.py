"""Figures between hosts: network namespaces that this program makes and removes.

Two kinds: joined by a switch, a process that delays what passes through it, or by
a bridge of the kernel's, at full speed or shaped. Making them needs root.
"""

import argparse
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import side_by_side
from side_by_side import Line

KINDS = ("nothing", "switch", "bridge")

# Round trips that a step takes: the slope of its time over the round-trip time.
ROUND_TRIPS = (0.02, 0.06)
SHAPES = {
  "inline, k = N": {"params": 1_000, "replicas": 2},
  "inline, k < N": {"params": 1_000, "replicas": 3, "aggregate": 2},
  "400 kB, k = N": {"params": 100_000, "replicas": 2},
}
GLOO_PARAMS, GLOO_GOAL = (1_000_000, 10_000_000), 1.0
PSUM_SECONDS, PSUM_GOAL = 0.1, 1.1
GIGABIT = 1e9
WIRE_GOAL = 1.15


def made(count: int, kind: str, rate: float = 0.0) -> Any:
  """Hosts; see `tests/helpers/networks/hosts.py`.

  Args:
    count: how many.
    kind: "switch" or "bridge".
    rate: bits per second out of each, on a bridge; 0 for no bound.

  Raises:
    SystemExit: there can be none here.
  """
  helpers = pathlib.Path(__file__).parents[2] / "tests" / "helpers" / "networks"
  sys.path.insert(0, str(helpers))
  import hosts

  why = hosts.not_permitted()
  if why:
    raise SystemExit(f"No hosts can be made here: {why}.")
  return hosts.Hosts(count, bridged=kind == "bridge", rate=rate)


def round_trips(args: argparse.Namespace) -> Iterator[Line]:
  """Yields how many round trips between hosts a step takes."""
  for shape, options in SHAPES.items():
    contenders = {
      f"{1e3 * trip:g} ms": (
        "replicas.py",
        {
          **options,
          "between": "switch",
          "delay": trip / 2,
          "seconds": args.seconds,
        },
      )
      for trip in ROUND_TRIPS
    }
    runs = side_by_side.in_turns(contenders, args.repeats)
    short, long = (
      min(side_by_side.values(each, "seconds_per_step"))
      for each in runs.values()
    )
    slope = (long - short) / (ROUND_TRIPS[1] - ROUND_TRIPS[0])
    yield Line(
      f"round trips in a step, {shape}",
      slope,
      "",
      "time at 20 and 60 ms, in ms",
      1e3 * short,
      slope,
      note=f"[{1e3 * short:.3g} and {1e3 * long:.3g}]",
    )


def against_gloo(args: argparse.Namespace) -> Iterator[Line]:
  """Yields steps per second against gloo with the same gradient and update."""
  for params in args.params or GLOO_PARAMS:
    common = {"params": params, "seconds": args.seconds}
    runs = side_by_side.in_turns(
      {
        "ours": ("replicas.py", {**common, "between": "bridge"}),
        "gloo": ("gloo_peer.py", {**common, "python": args.torchft_python}),
      },
      args.repeats,
    )
    ours, gloo = (
      side_by_side.values(each, "steps_per_second") for each in runs.values()
    )
    yield side_by_side.against(
      f"between hosts, {params:,} parameters",
      "steps/s",
      ours,
      "gloo, with the same JAX",
      gloo,
      (GLOO_GOAL, float("inf")),
    )


def against_psum(args: argparse.Namespace) -> Iterator[Line]:
  """Yields the time of a step without faults against one program's."""
  for params in args.params or (10_000_000,):
    common = {"params": params, "steps": args.steps or 30}
    latency = f"constant:{PSUM_SECONDS}"
    runs = side_by_side.in_turns(
      {
        "ours": (
          "replicas.py",
          {**common, "between": "bridge", "latency": latency},
        ),
        "psum": ("psum_peer.py", {**common, "latency": PSUM_SECONDS}),
      },
      args.repeats,
    )
    ours, psum = (
      [1e3 * x for x in side_by_side.values(each, "seconds_per_step")]
      for each in runs.values()
    )
    yield side_by_side.against(
      f"{1e3 * PSUM_SECONDS:g} ms of computing, {params:,} parameters",
      "ms",
      ours,
      "one program with psum",
      psum,
      (0.0, PSUM_GOAL),
    )


def gigabit(args: argparse.Namespace) -> Iterator[Line]:
  """Yields the time of a step over 1 Gbit/s against that of its bytes."""
  for params in args.params or (1_000_000, 10_000_000):
    options = {"params": params, "seconds": args.seconds}
    line = {"between": "bridge", "rate": GIGABIT}
    said = [
      side_by_side.run("replicas.py", options | line, 120.0)
      for _ in range(args.repeats)
    ]
    # Both send as much as they get, at the same time.
    due = [
      8 * max(one["bytes_out"] for one in each["bytes_per_step"]) / GIGABIT
      for each in said
    ]
    yield side_by_side.against(
      f"step over 1 Gbit/s, {4 * params / 1e6:g} MB",
      "ms",
      [1e3 * each["seconds_per_step"] for each in said],
      "its bytes over the wire",
      [1e3 * each for each in due],
      (0.0, WIRE_GOAL),
    )
